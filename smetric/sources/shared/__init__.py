"""State that several routers share: the endpoint through which they exchange placements.

A router without peers serves the endpoint's bounds, too, but does not load the exchange itself.
"""

#: Path of the admin port where peers receive batches (POST) and return an image of their index (GET).
PATH = "/admin/placements"
#: Largest batch accepted, bytes.
MAX_BATCH_BYTES = 4 * 1024 * 1024
#: Status with which a router answers its own batch.
OWN = 421


class UnreadableBatch(Exception):
    """Bytes that are not a batch of this version. The message says why and quotes none of them."""


class OwnBatch(Exception):
    """A batch that came to the router that sent it."""
