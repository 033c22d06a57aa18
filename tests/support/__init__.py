"""What tests, benchmarks and the Makefile share: private services, system programs, waiting."""
