"""A byte stream for tests of what reads one."""

import io


class Blocks(io.BytesIO):
    """Gives its bytes in blocks of given sizes, as a pipe does."""

    def __init__(self, content, sizes):
        super().__init__(content)
        self.sizes = iter(sizes)

    def read1(self, size=-1):
        return super().read1(next(self.sizes, size))
