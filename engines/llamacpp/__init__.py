"""llama.cpp as an engine, with the files that it reads and writes."""
