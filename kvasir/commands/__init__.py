"""The commands of `kvasir`, grouped by topic. The code behind `plan` is a separate package."""
