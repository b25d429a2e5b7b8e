"""`gristmill chat`: a conversation in the terminal with streamed answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gristmill.dataprep.examples.conversations import Message
from gristmill.train.data.conversation_tokens import ChatError
from gristmill.train.generation.language_model import LanguageModel, TextStream
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Request, Scheduler

HELP = (
    "/clear starts over, /trace shows where passages of the last answer stand in the "
    "training rows, /exit (or end of file) ends; an interrupt stops an answer."
)


def answer(
    language: LanguageModel,
    scheduler: Scheduler,
    messages: list[Message],
    sampling: Sampling,
    max_new_tokens: int,
) -> Iterator[str]:
    """Yield the model's answer to a conversation in pieces; closing the iterator
    cancels the request.

    Raises:
        gristmill.train.generation.scheduler.PromptTooLongError: the conversation fills
            the model's sequence length.
        ChatError: the template refuses it.
    """
    prompt = language.chat_prompt(messages)
    number = scheduler.add(Request(prompt, max_new_tokens, language.stops, sampling))
    stream = TextStream(language.decode)
    try:
        while not scheduler.is_idle:
            for progress in scheduler.step():
                yield stream.push(progress.tokens)
        yield stream.finish()
    finally:
        scheduler.cancel(number)


def converse(
    language: LanguageModel,
    scheduler: Scheduler,
    sampling: Sampling,
    max_new_tokens: int,
    system: str | None,
    read: Callable[[], str | None],
    write: Callable[[str], None],
    trace: Callable[[str], None],
) -> None:
    """Answer the user's messages until the user ends the conversation.

    Args:
        language, scheduler: the model and its scheduler.
        sampling: of every answer; turn k of the conversation adds k to the seed.
        max_new_tokens: longest answer.
        system: a system message.
        read: returns the user's next message without its line end; None at the end.
        write: shows a piece of text at once.
        trace: shows where passages of an answer stand in the training rows.
    """
    beginning: list[Message] = (
        [] if system is None else [{"role": "system", "content": system}]
    )
    messages = beginning
    turn = 0
    while (text := read()) is not None and (command := text.strip()) != "/exit":
        if command == "/clear":
            messages = beginning
            write("(started over)\n")
            continue
        if command == "/trace":
            if messages and messages[-1]["role"] == "assistant":
                trace(messages[-1]["content"])
            else:
                write("(no answer yet)\n")
            continue
        if not command:
            continue
        conversation: list[Message] = [*messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        seeded = replace(sampling, seed=sampling.seed + turn)
        try:
            for piece in answer(
                language, scheduler, conversation, seeded, max_new_tokens
            ):
                pieces.append(piece)
                write(piece)
        except KeyboardInterrupt:
            write(" (stopped)")
        except (ChatError, ValueError) as error:
            write(f"(not answered: {error}; /clear starts over)\n")
            continue
        write("\n")
        turn += 1
        messages = [*conversation, {"role": "assistant", "content": "".join(pieces)}]
