"""What is predicted: one file a task. `regression.py` holds `Regression`, which is called "regression"."""
