"""Count the modules of fedcir that a command loads: `python benchmarks/closures.py [SOURCE]` (a folder with `fedcir`).

Static: modules reached from a command's module by following every import, also those inside functions. Loaded: modules
in `sys.modules` after the command has run once on the embedded data (`predict` on the model of that run). The loaded
count of the Flower client is that of importing its app. Also prints lines, modules, small modules, the largest folder.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STARTS = {"run": "fedcir.cli.run", "predict": "fedcir.cli.predict", "Flower client": "fedcir.flower.client_app"}

COUNT = """
import atexit, sys
atexit.register(lambda: print("LOADED", sum(name.split(".")[0] == "fedcir" for name in sys.modules), file=sys.stderr))
"""


def imports_of(path: Path) -> set[str]:
    """Dotted names that any import statement of a file mentions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def static_closure(source: Path, start: str) -> set[str]:
    """Modules reachable from `start`, packages included."""
    files = {}
    for path in (source / "fedcir").rglob("*.py"):
        parts = path.relative_to(source).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    reached: set[str] = set()
    waiting = {start}
    while waiting:
        name = waiting.pop()
        if name in reached or name not in files:
            continue
        reached.add(name)
        waiting |= imports_of(files[name]) if name != "fedcir" else set()  # its public names are imported on use
        waiting.add(name.rpartition(".")[0])
    return reached


def loaded(source: Path, *arguments: str, code: str = "from fedcir.cli import main; main()") -> int:
    """Number of fedcir's modules in a process that has run `fedcir ARGUMENTS`."""
    script = f"{COUNT}\nsys.argv = ['fedcir', *{list(arguments)!r}]\n{code}\n"
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    counts = [line.split()[1] for line in ended.stderr.splitlines() if line.startswith("LOADED")]
    assert ended.returncode == 0, ended.stderr
    return int(counts[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", nargs="?", default=str(Path(__file__).parents[1] / "src"))
    source = Path(parser.parse_args().source).resolve()
    files = sorted((source / "fedcir").rglob("*.py"))
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    folders = [folder for folder in {path.parent for path in files} if folder.name != "__pycache__"]
    largest = max(folders, key=lambda folder: len(entries(folder)))
    print(f"lines {sum(lines.values()):,}, modules {len(files)}, under 40 lines {sum(n < 40 for n in lines.values())}")
    print(f"largest folder {largest.relative_to(source)}: {len(entries(largest))} entries")
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        image = Path(folder) / "image.png"
        from PIL import Image

        Image.new("RGB", (28, 28), (90, 80, 70)).save(image)
        counts = {
            "run": loaded(
                source, *["run", "--rounds", "1", "--local-steps", "1", "--workers", "1", "--quiet", "--out"], run
            ),
            "predict": loaded(source, "predict", run, str(image), "--json"),
            "Flower client": loaded(source, code="import fedcir.flower.client_app"),
        }
    for name, start in STARTS.items():
        print(f"{name}: static {len(static_closure(source, start))}, loaded {counts[name]}")


def entries(folder: Path) -> list[Path]:
    """Modules and packages in a folder, without its `__init__.py`."""
    packages = [path for path in folder.iterdir() if (path / "__init__.py").exists()]
    return [path for path in folder.glob("*.py") if path.name != "__init__.py"] + packages


if __name__ == "__main__":
    main()
