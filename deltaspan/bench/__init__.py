"""How long things take on this machine, recorded with the machine, the versions and the commit."""
