"""The commands of `kvasir`, grouped by what they are about; `plan` has its own package."""
