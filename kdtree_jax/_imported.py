"""When this package was imported: what is written to its files later is not."""

import time

AT = time.time()
