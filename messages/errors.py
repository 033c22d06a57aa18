"""The error tree, sorted by what happens next.

    KvasirError
    ├── Retry                 may succeed later: the job goes to a retry level and an attempt is counted
    │   ├── EngineUnavailable
    │   ├── StoreUnavailable      (workers go on without the store, and say so)
    │   └── BrokerUnavailable     (in a worker: left unacked, the broker hands the job out again)
    ├── KVTransferFailed        the stored KV cache can't be used: prefilled again, no attempt is counted
    ├── NewerMessage          written by a newer version: waits in a retry level for the upgrade
    ├── DeadLetter            can never succeed: failed result, then the dead-letters queue
    │   ├── InvalidMessage
    │   ├── InvalidSchema
    │   ├── InvalidPrompt
    │   ├── ContextExceeded
    │   ├── AttemptsExhausted
    │   └── Poison
    ├── Stopped               not an error of the job: the attempt says why, and so whether it ends or goes back
    │   ├── Cancelled         by the engine: it was told to stop
    │   └── NoCapacity        (`prefill_worker.admission`) the store has no space for it now
    └── UsageError            a person can fix it: exit code 2
        ├── ConfigError
        ├── RubricError
        ├── SubmissionError
        ├── BatchError
        └── NoQueue

Any other exception that reaches a worker's handler is a bug of ours; the handler treats it as `DeadLetter` and
logs the traceback, because running a bug again is the surest way to lose a night.
"""


class KvasirError(Exception):
    """The base class of every error that Kvasir raises on purpose."""


class Retry(KvasirError):
    """The same job may succeed later, here or on another worker."""


class EngineUnavailable(Retry):
    """The engine did not answer, or lost its model; the job itself is not at fault."""


class StoreUnavailable(Retry):
    """The KV store could not be reached, or refused the command."""


class BrokerUnavailable(Retry):
    """The broker could not be reached, or refused the message for now."""


class KVTransferFailed(KvasirError):
    """A KV cache is missing, damaged, or belongs to another model: its job must be prefilled again."""


class NewerMessage(KvasirError):
    """The message's version is newer than this program reads."""


class DeadLetter(KvasirError):
    """The job can't succeed, however often it is retried."""


class InvalidMessage(DeadLetter):
    """The bytes are not a Kvasir message, or a field is missing, mistyped or out of bounds."""


class InvalidSchema(DeadLetter):
    """The engine can't turn the job's JSON schema into a constraint."""


class InvalidPrompt(DeadLetter):
    """The engine can't render the job's conversation, or can't answer its questions."""


class ContextExceeded(DeadLetter):
    """Prompt and answer together are longer than the model's context."""


class AttemptsExhausted(DeadLetter):
    """The job met a transient error more often than its attempts allow."""


class Poison(DeadLetter):
    """Too many workers died while holding the job, and none reported why. The job is assumed to kill its workers."""


class Stopped(KvasirError):
    """A person or a limit ended the job before it was done."""


class Cancelled(Stopped):
    """The engine was told to stop: the job's batch was cancelled, its deadline passed, or its worker is shutting
    down."""


class UsageError(KvasirError):
    """The command, its input or its configuration is at fault; the message says what to do."""


class ConfigError(UsageError):
    """A setting is missing, unknown, or has a value that can't be used."""


class RubricError(UsageError):
    """The rubric can't be used as it is."""


class SubmissionError(UsageError):
    """One submission can't be read; the rest of the class goes on."""


class BatchError(UsageError):
    """The batch folder belongs to another batch, or is owned by another process."""


class NoQueue(UsageError):
    """The message's queue does not exist: its model is not in the configuration."""
