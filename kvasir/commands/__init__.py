"""The commands of `kvasir`, a module for each group."""
