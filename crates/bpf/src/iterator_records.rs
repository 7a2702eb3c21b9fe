//! Reading of the records that a kernel iterator produces.

use std::io::{self, Read};

use zerocopy::FromBytes;

/// Number of bytes read at a time: the kernel's maximum.
const CHUNK_BYTES: usize = 32 << 10;

/// Reads all records of a BPF iterator's output, each of the size of `T`.
pub(crate) fn read_all<T: FromBytes>(iter: impl Read) -> io::Result<Vec<T>> {
    let bytes = read_bytes(iter)?;
    let records = bytes.chunks_exact(size_of::<T>());
    let records = records.filter_map(|record| T::read_from_bytes(record).ok());
    Ok(records.collect())
}

/// Reads all records as bytes, for records that differ in length.
pub(crate) fn read_bytes(mut iter: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    loop {
        let end = bytes.len();
        bytes.resize(end + CHUNK_BYTES, 0);
        let count = match iter.read(&mut bytes[end..]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                bytes.truncate(end);
                continue;
            }
            outcome => outcome?,
        };
        bytes.truncate(end + count);
        if count == 0 {
            return Ok(bytes);
        }
    }
}
