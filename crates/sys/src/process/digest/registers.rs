//! Registers of threads.

use crate::process::trace::Registers;

/// General registers and the others.
pub(crate) fn of_thread(registers: &Registers, extended: &[u8]) -> u32 {
    let general = postcard::to_stdvec(registers).unwrap_or_default();
    crc32c::crc32c_append(crc32c::crc32c(&general), extended)
}
