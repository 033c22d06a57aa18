"""A folder that is on the host process's path. Kvasir itself imports only its wire formats."""
