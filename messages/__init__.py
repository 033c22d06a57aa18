"""What travels: jobs, results, KV caches, the lifecycle, the error tree. No I/O; imports nothing of ours."""
