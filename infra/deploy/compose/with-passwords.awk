# Copies a file with the environment's values where ${NAME} stands. (As an argument a password would be in every process
# list, and sh reads backslashes in a here-document.)
{
    while (match($0, /\$\{[A-Z_]+\}/))
        $0 = substr($0, 1, RSTART - 1) ENVIRON[substr($0, RSTART + 2, RLENGTH - 3)] substr($0, RSTART + RLENGTH)
    print
}
