//! Checksums of registers.

use crate::trace::Registers;

/// Returns the checksum of the general and the extended registers of a thread.
pub(crate) fn checksum_thread(registers: &Registers, extended: &[u8]) -> u32 {
    let general = postcard::to_stdvec(registers).unwrap_or_default();
    crc32c::crc32c_append(crc32c::crc32c(&general), extended)
}
