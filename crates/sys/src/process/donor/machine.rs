//! What a tree takes for granted of the machine under it.

use super::halt::Halted;
use crate::process::error::Result;
use crate::process::image::Clocks;
use crate::process::procfs::MapLine;

/// The kernel's code in a process.
pub(super) fn read_vdso(halted: &Halted, lines: &[MapLine]) -> Result<Vec<u8>> {
    let Some(line) = lines.iter().find(|line| line.name == b"[vdso]") else {
        return Ok(Vec::new());
    };
    let mut bytes = vec![0; (line.end - line.start) as usize];
    halted.memory.read(line.start, &mut bytes)?;
    Ok(bytes)
}

/// XCR0, as ptrace tells it.
pub(crate) fn features(extended: &[u8]) -> u64 {
    let word = extended
        .get(464..472)
        .and_then(|bytes| bytes.try_into().ok());
    word.map_or(0, u64::from_ne_bytes)
}

/// Tells this run of this kernel from all others.
pub(crate) fn boot_id() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    text.unwrap_or_default().trim().to_owned()
}

/// The donor's clocks.
pub(super) fn clocks() -> Clocks {
    let now = |clock| {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `time` is writable and outlives the call.
        unsafe { libc::clock_gettime(clock, &raw mut time) };
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    };
    Clocks {
        monotonic_ns: now(libc::CLOCK_MONOTONIC),
        boot_ns: now(libc::CLOCK_BOOTTIME),
    }
}
