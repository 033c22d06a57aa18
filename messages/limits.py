"""Every limit on input from outside, in one table that the gateway, workers and readers use.

Each limit is checked before the work that it limits begins. `docs/reference/limits.md` lists them, and each has a test.
The limits on students' submissions are where submissions are read (`grading/submissions/archives.py`).
"""

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

# A job.
MAX_PROMPT_BYTES = 1 * _MIB
MAX_ANSWER_BYTES = 4 * _MIB
MAX_PARTS = 256  # parts of a prompt, including the parts of its questions

# Limit for the number of strings, lists, objects and commas in a JSON text. They are counted before it is parsed. A
# schema of the maximum size has about 60,000 of them.
MAX_JSON_PIECES = 100_000

# Limits for a job's JSON schema. To build a grammar from a schema, libraries unroll repetitions, follow references
# recursively on the native stack, and multiply automata. They check their own limits only afterwards.
MAX_SCHEMA_BYTES = 256 * _KIB
MAX_SCHEMA_VALUES = 40_000
MAX_SCHEMA_DEPTH = 64
MAX_REFERENCE_LEVELS = 2_000  # a schema's nesting depth times the number of parts that it refers to
MAX_ITEMS = 50_000  # sum of minItems and maxItems of all arrays in a schema
MAX_LENGTHS = 10_000_000  # sum of minLength and maxLength of all texts in a schema
MAX_PATTERN_BYTES = 4 * _KIB
MAX_REPETITIONS = 100_000  # product of all repetition counts in a pattern
MAX_DIVISOR_DIGITS = 5  # significant digits of multipleOf
MAX_JOINED_PATTERNS = 8  # patterns in a schema in which one value has to meet several conditions

# Limits for requests to the gateway.
MAX_BODY_BYTES = 8 * _MIB
MAX_BODIES_BYTES = 64 * _MIB  # for all requests under way, in total
MAX_BODIES_BYTES_PER_KEY = 32 * _MIB
MAX_HEADER_BYTES = 64 * _KIB
MAX_CONNECTIONS = 512
MAX_GUESTS = 256  # connections without an authorized request so far; if there is one more, the oldest is closed
MAX_OPEN = 256  # requests under way, including streams
MAX_OPEN_PER_KEY = 128
MAX_ENTRIES = MAX_PARTS  # entries of a list or an object in a request; schemas have their own limit

# Files and batches.
MAX_LINES = 50_000
MAX_LINE_BYTES = 8 * _MIB
MAX_FILE_BYTES = 200 * _MIB
MAX_UPLOAD_BYTES = MAX_FILE_BYTES + 64 * _KIB  # a file of the maximum size, plus the form that contains it
MAX_UPLOADS_BYTES = 4 * _GIB  # for all uploads under way, in total
MAX_UPLOADS_BYTES_PER_KEY = 1 * _GIB
MAX_FILES_BYTES_PER_KEY = 20 * _GIB
MAX_BATCHES = 256  # under way
MAX_BATCHES_PER_KEY = 32

# Limits for replies of other servers.
MAX_REPLY_BYTES = 4 * _MIB  # a reply to the openai or ollama engine: a list of models, an error, or a line of a stream
MAX_STREAM_BYTES = 64 * _MIB  # a whole stream: 200,000 tokens, each in a separate event
MAX_WAITING_EVENTS = 1_000  # events that were received but not yet read
MAX_SERVER_REPLY_BYTES = 8 * _MIB  # a reply of llama-server or vLLM; it can list all tokens of a prompt

# Limits for a chat template. Before its first use, it is rendered once in a separate process, within these limits.
TEMPLATE_S = 5  # of computing
MAX_TEMPLATE_MEMORY_BYTES = 256 * _MIB
