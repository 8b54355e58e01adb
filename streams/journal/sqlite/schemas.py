"""The schemas of a journal's file, each as the migration from the one before it."""

from typing import Final

from sqlite_utils import Database, Migrations

migrations: Final = Migrations("mcp-streams")


@migrations()
def initial(db: Database) -> None:
    """Schema 1."""
    db.table("streams").create(
        {
            "id": int,
            "stream": str,
            "principal": str,
            "origin": bytes,
            "min_s": float,
            "max_s": float,
            "created_at": float,
            "is_announced": int,
        },
        pk="id",
        not_null={"stream", "principal", "origin", "min_s", "max_s", "created_at", "is_announced"},
    )
    db.table("streams").create_index(["stream"], unique=True)
    progress = ["fence", "last", "acked", "last_request", "last_error"]
    db.table("progress").create(
        {"id": int, **dict.fromkeys(progress, int), "outcome": str, "ended_at": float},
        pk="id",
        not_null={*progress, "outcome", "ended_at"},
    )
    db.table("runs").create(
        {"stream": int, "last": int, "count": int, "body": bytes},
        not_null={"stream", "last", "count", "body"},
    )
    db.table("runs").create_index(["stream", "last"])


@migrations()
def sessions(db: Database) -> None:
    """Schema 2."""
    session = {
        "key": str,
        "principal": str,
        "revision": str,
        "capabilities": bytes,
        "level": str,
        "seen_at": float,
    }
    db.table("sessions").create(session, pk="key", not_null=session)
    grant = {"session": str, "delivery": str, "stream": str, "reply_id": bytes}
    db.table("grants").create(grant, pk=("session", "delivery"), not_null=grant)
    db.table("grants").create_index(["stream"])


@migrations()
def pages(db: Database) -> None:
    """Schema 3. Existing streams have no pages, and existing grants take nothing over."""
    db.table("progress").add_column("pages", str)
    db.table("grants").add_column("takes_over", int, not_null_default=0)
    db.table("grants").add_column("start", int, not_null_default=0)


@migrations()
def lookups(db: Database) -> None:
    """Schema 4. No existing stream is evicted."""
    db.table("ownership").create({"claims": int}, not_null={"claims"})
    db.execute("INSERT INTO ownership (claims) VALUES (0)")
    db.table("awake").create({"id": int}, pk="id")
    db.execute("INSERT INTO awake (id) SELECT id FROM streams")
    rest = {"id": int, "owner": bytes, "due_at": float, "is_wanted": int, "is_read": int}
    db.table("rests").create(rest, pk="id", not_null=rest.keys() - {"id"})
    db.table("rests").create_index(["due_at"])
    for name, columns, which in (
        ("wanted", "owner, id, is_read", "is_wanted"),
        ("leftover", "due_at", "NOT is_wanted"),
    ):
        db.execute(f"CREATE INDEX idx_rests_{name} ON rests ({columns}) WHERE {which}")
    names = {"name": bytes, "stream": int}
    db.table("names").create(names, pk="name", not_null=names)
    db.table("names").create_index(["stream"])


@migrations()
def log(db: Database) -> None:
    """Schema 5. The log is empty at first."""
    db.table("log").create({"id": int, "body": bytes}, pk="id", not_null={"body"})


@migrations()
def restart(db: Database) -> None:
    """Schema 6. Existing calls do not restart."""
    db.table("progress").add_column("restart", bytes)


@migrations()
def webhooks(db: Database) -> None:
    """Schema 7. No webhook waits."""
    webhook = {
        "id": str,
        "stream": str,
        "url": str,
        "body": bytes,
        "due_at": float,
        "attempts": int,
    }
    db.table("webhooks").create(webhook, pk="id", not_null=webhook)
    db.table("webhooks").create_index(["due_at"])


@migrations()
def streams_in_log(db: Database) -> None:
    """Schema 8. The log may have streams that no table has; that of an older file has none."""
