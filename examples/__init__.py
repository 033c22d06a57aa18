"""Things to try Kvasir with: a tiny model and a made-up class. Nothing here is installed."""
