"""Which client holds which samples, and the manifest that names them."""
