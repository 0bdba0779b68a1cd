import hashlib, os, shutil, sys, tarfile
digest, target, *parts = sys.argv[1:]
if os.path.isdir(target):
    sys.exit(0)
whole, making = hashlib.sha256(), target + ".tmp"
shutil.rmtree(making, ignore_errors=True)
os.makedirs(making)
packed = making + ".tar.gz"
with open(packed, "wb") as out:
    for part in parts:
        with open(part, "rb") as file:
            for data in iter(lambda: file.read(1 << 20), b""):
                whole.update(data)
                out.write(data)
if whole.hexdigest() != digest:
    sys.exit("accel: the code is not what was submitted: its sha256 is %s, not %s" % (whole.hexdigest(), digest))
with tarfile.open(packed, "r:gz", encoding="utf-8", errors="surrogateescape") as tar:
    if hasattr(tarfile, "data_filter"):
        tar.extractall(making, filter="data")
    else:
        tar.extractall(making)
os.unlink(packed)
os.rename(making, target)
