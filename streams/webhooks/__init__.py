"""Webhooks: messages to other programs when a call ends, or asks while no client is attached.

They have the headers and signatures of Standard Webhooks (standardwebhooks.com).

- `events` has what is sent. `queue` decides which events of which calls are sent where, and adds
  them to the commit of the lines that they tell of.
- `sender` sends what waits in the journal, again and again until its receiver has taken it.
- `receivers` decides which URLs and which addresses may be sent to, `signatures` has the secrets.

An event is sent at least once: after a crash a receiver may get it a second time, with the same id.
"""
