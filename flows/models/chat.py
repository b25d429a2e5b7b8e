"""`gristmill chat`: a conversation in the terminal, the answers shown as they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gristmill.train.data.conversation_tokens import ChatError, Message
from gristmill.train.generation.language_model import LanguageModel, TextStream
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Request, Scheduler

HELP = (
    "/clear starts over, /trace shows where passages of the last answer stand in the training rows, /exit (or end "
    "of file) ends; an interrupt stops an answer."
)


def answer(
    language: LanguageModel, scheduler: Scheduler, messages: list[Message], sampling: Sampling, max_new_tokens: int
) -> Iterator[str]:
    """The model's answer to a conversation, piece by piece; what runs is cancelled if nobody reads on.

    Raises:
        gristmill.train.generation.scheduler.PromptTooLongError: the conversation fills the model's sequence length.
        ChatError: the template refuses it.
    """
    prompt = language.chat_prompt(messages)
    number = scheduler.add(Request(prompt, max_new_tokens, language.stops, sampling))
    stream = TextStream(language.decode)
    try:
        while not scheduler.is_idle:
            for one in scheduler.step():
                yield stream.push(one.tokens)
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
    """Read what the user says and write what the model answers until the user ends it.

    Args:
        language, scheduler: the model, and what runs it.
        sampling: of every answer; turn k of the conversation adds k to the seed.
        max_new_tokens: longest answer.
        system: a system message.
        read: what the user says, without its line end; None at the end.
        write: shows a piece of text at once.
        trace: shows where passages of an answer stand in the training rows.
    """
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages, turn = list(first), 0
    while (said := read()) is not None and said.strip() != "/exit":
        if said.strip() == "/clear":
            messages = list(first)
            write("(started over)\n")
            continue
        if said.strip() == "/trace":
            answers = [message["content"] for message in messages if message["role"] == "assistant"]
            trace(answers[-1]) if answers else write("(no answer yet)\n")
            continue
        if not said.strip():
            continue
        asked: list[Message] = [*messages, {"role": "user", "content": said}]
        pieces: list[str] = []
        try:
            for piece in answer(
                language, scheduler, asked, replace(sampling, seed=sampling.seed + turn), max_new_tokens
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
        messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
