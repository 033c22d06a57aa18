"""Translates pika's exceptions into ours, by class and by AMQP reply code."""

import asyncio
import socket
import ssl

from pika import exceptions as pika_errors  # type: ignore[import-untyped]
from pika.adapters.utils import connection_workflow as workflow  # type: ignore[import-untyped]

from messages.errors import BatchError, BrokerUnavailable, ConfigError, InvalidMessage, KvasirError, NoQueue

# AMQP 0-9-1 reply codes
ACCESS_REFUSED = 403
NOT_FOUND = 404
RESOURCE_LOCKED = 405
PRECONDITION_FAILED = 406
NOT_ALLOWED = 530

# Every class of `pika.exceptions`. A test compares this table with pika, so that no new class is overlooked.
BY_CLASS: dict[type[Exception], type[KvasirError]] = {
    pika_errors.AMQPError: BrokerUnavailable,
    # The connection is gone or could not be opened. It will be opened again.
    pika_errors.AMQPConnectionError: BrokerUnavailable,
    pika_errors.ConnectionOpenAborted: BrokerUnavailable,
    pika_errors.StreamLostError: BrokerUnavailable,
    pika_errors.ConnectionWrongStateError: BrokerUnavailable,
    pika_errors.ConnectionClosed: BrokerUnavailable,
    pika_errors.ConnectionClosedByBroker: BrokerUnavailable,
    pika_errors.ConnectionClosedByClient: BrokerUnavailable,
    pika_errors.ConnectionBlockedTimeout: BrokerUnavailable,
    pika_errors.AMQPHeartbeatTimeout: BrokerUnavailable,
    pika_errors.NoFreeChannels: BrokerUnavailable,
    # pika also raises this error while a broker is starting.
    pika_errors.IncompatibleProtocolError: BrokerUnavailable,
    # The broker refused the login or the virtual host, so a person has to correct the URL.
    pika_errors.AuthenticationError: ConfigError,
    pika_errors.ProbableAuthenticationError: ConfigError,
    pika_errors.ProbableAccessDeniedError: ConfigError,
    # A channel was closed. The reply code says why; see `of_reply`.
    pika_errors.AMQPChannelError: BrokerUnavailable,
    pika_errors.ChannelWrongStateError: BrokerUnavailable,
    pika_errors.ChannelClosed: BrokerUnavailable,
    pika_errors.ChannelClosedByBroker: BrokerUnavailable,
    pika_errors.ChannelClosedByClient: BrokerUnavailable,
    pika_errors.ChannelError: BrokerUnavailable,
    pika_errors.ConsumerCancelled: BrokerUnavailable,
    pika_errors.NackError: BrokerUnavailable,
    pika_errors.UnroutableError: NoQueue,
    # The peer sent bytes that can't be read, so the connection is opened again.
    pika_errors.ProtocolSyntaxError: BrokerUnavailable,
    pika_errors.UnexpectedFrameError: BrokerUnavailable,
    pika_errors.ProtocolVersionMismatch: BrokerUnavailable,
    pika_errors.BodyTooLongError: BrokerUnavailable,
    pika_errors.InvalidFrameError: BrokerUnavailable,
    pika_errors.InvalidFieldTypeException: BrokerUnavailable,
    # Our message can't be written as AMQP.
    pika_errors.UnsupportedAMQPFieldException: InvalidMessage,
    pika_errors.ShortStringTooLong: InvalidMessage,
    # Only a bug in Kvasir can cause these errors.
    pika_errors.DuplicateConsumerTag: BrokerUnavailable,
    pika_errors.DuplicateGetOkCallback: BrokerUnavailable,
    pika_errors.InvalidChannelNumber: BrokerUnavailable,
    pika_errors.MethodNotImplemented: BrokerUnavailable,
    pika_errors.ReentrancyError: BrokerUnavailable,
}


def translate(error: BaseException, action: str) -> KvasirError:
    """Return our error for an error of pika, the socket or TLS. `action` begins the sentence ("reading queue x")."""
    if isinstance(error, KvasirError):
        return error
    if isinstance(error, pika_errors.ChannelClosed):
        return of_reply(error.reply_code, error.reply_text, action)
    if isinstance(_root(error), ssl.SSLCertVerificationError):
        return ConfigError(f"{action}: {describe(error)}")
    meaning = next((BY_CLASS[cls] for cls in type(error).__mro__ if cls in BY_CLASS), BrokerUnavailable)
    return meaning(f"{action}: {describe(error)}")


def of_reply(code: int, text: str, action: str) -> KvasirError:
    """Return our error for a channel that the broker closed with this reply."""
    sentence = f"{action}: the broker answered {code} {text}"
    if code == NOT_FOUND:
        return NoQueue(sentence)
    if code == RESOURCE_LOCKED or (code == ACCESS_REFUSED and "exclusive" in text):
        return BatchError(f"{sentence} (another process reads this queue)")
    if code == ACCESS_REFUSED:
        return ConfigError(sentence)
    return BrokerUnavailable(sentence)


def is_hopeless(error: BaseException) -> bool:
    """Whether trying to connect again can't help: the broker refused our login or virtual host, or we its certificate.

    pika also raises "probable" access errors when a connection is lost while logging in, which happens when a broker is
    killed. Those don't count.
    """
    root = _root(error)
    if isinstance(root, ssl.SSLCertVerificationError):
        return True
    is_refusal = any(f"({code})" in _reply_text(root) for code in (ACCESS_REFUSED, NOT_ALLOWED))
    return is_refusal and isinstance(translate(root, ""), ConfigError)


def describe(error: BaseException) -> str:
    """Describe the innermost cause in a few words.

    It never shows a password, since pika gets no URL that it could print.
    """
    root = _root(error)
    if isinstance(root, pika_errors.ProbableAuthenticationError | pika_errors.AuthenticationError):
        return "user name or password refused"
    if isinstance(root, pika_errors.ProbableAccessDeniedError):
        return f"no access to the virtual host ({_reply_text(root)})"
    timeouts = workflow.AMQPConnectorStackTimeout | socket.timeout | asyncio.TimeoutError
    # ConnectionOpenAborted: the broker accepted the connection, and then did not answer.
    if isinstance(root, timeouts | pika_errors.ConnectionOpenAborted):
        return "no answer in time"
    if isinstance(root, pika_errors.IncompatibleProtocolError):  # a proxy in front of a dead broker causes this too
        return "it accepts the connection and hangs up: RabbitMQ is not running behind it, or has not started yet"
    if isinstance(root, ssl.SSLCertVerificationError):
        problem = root.verify_message or str(root)
        return f"its certificate is not trusted ({problem}): set broker_ca_file to the file of the CA that signed it"
    if isinstance(root, ssl.SSLError | OSError) and root.args:
        return str(root)
    return f"{type(root).__name__} {_reply_text(root)}".strip()


def _root(error: BaseException) -> BaseException:
    """Return the innermost cause."""
    for _ in range(10):
        inner: object = getattr(error, "exceptions", None) or getattr(error, "exception", None)
        if not inner and isinstance(error, pika_errors.AMQPConnectionError) and error.args:
            inner = error.args[0]
        if isinstance(inner, list | tuple):
            inner = inner[-1]
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error


def _reply_text(error: BaseException) -> str:
    return ", ".join(str(argument) for argument in error.args)
