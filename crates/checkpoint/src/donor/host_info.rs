//! Host properties that processes depend on: vDSO, XCR0, boot ID, clocks.

use super::halt::HaltedProcess;
use crate::error::Result;
use crate::image::ClockReadings;
use crate::procfs::MapLine;

/// Reads the vDSO of a process.
pub(super) fn read_vdso(halted: &HaltedProcess, lines: &[MapLine]) -> Result<Vec<u8>> {
    let Some(line) = lines.iter().find(|line| line.name == b"[vdso]") else {
        return Ok(Vec::new());
    };
    let mut bytes = vec![0; (line.end - line.start) as usize];
    halted.memory.read(line.start, &mut bytes)?;
    Ok(bytes)
}

/// Returns XCR0, as ptrace reports it.
pub(crate) fn xcr0(extended: &[u8]) -> u64 {
    let word = extended
        .get(464..472)
        .and_then(|bytes| bytes.try_into().ok());
    word.map_or(0, u64::from_ne_bytes)
}

/// Returns the ID of this boot of this kernel.
pub(crate) fn boot_id() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    text.unwrap_or_default().trim().to_owned()
}

/// Reads the donor's clocks.
pub(super) fn read_clocks() -> ClockReadings {
    let time_ns = |clock| {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `time` is writable and outlives the call.
        unsafe { libc::clock_gettime(clock, &raw mut time) };
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    };
    ClockReadings {
        monotonic_ns: time_ns(libc::CLOCK_MONOTONIC),
        boot_ns: time_ns(libc::CLOCK_BOOTTIME),
    }
}
