//! Records that an iterator of the kernel's gives.

use std::io::{self, Read};

use zerocopy::FromBytes;

/// Bytes read at a time: what the kernel gives at most.
pub(crate) const CHUNK: usize = 32 << 10;

/// All of them.
pub(crate) fn read_all<T: FromBytes>(iter: impl Read) -> io::Result<Vec<T>> {
    read_counted(iter).map(|(records, _)| records)
}

/// All of them, and how many bytes came at once at most.
pub(crate) fn read_counted<T: FromBytes>(mut iter: impl Read) -> io::Result<(Vec<T>, usize)> {
    let mut bytes = Vec::new();
    let mut longest = 0;
    loop {
        let end = bytes.len();
        bytes.resize(end + CHUNK, 0);
        let count = match iter.read(&mut bytes[end..]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                bytes.truncate(end);
                continue;
            }
            outcome => outcome?,
        };
        bytes.truncate(end + count);
        longest = longest.max(count);
        if count == 0 {
            break;
        }
    }
    let records = bytes.chunks_exact(size_of::<T>());
    let records = records.filter_map(|record| T::read_from_bytes(record).ok());
    Ok((records.collect(), longest))
}
