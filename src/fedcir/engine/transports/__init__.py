"""How a state reaches clients on this machine, and their replies come back."""
