"""The message types: jobs, results, KV caches, the steps of a job, and the errors. No I/O; imports no other package of
this project."""
