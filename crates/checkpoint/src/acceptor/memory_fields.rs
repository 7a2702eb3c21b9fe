//! Addresses that the kernel keeps of a process's code, data, arguments and environment (`struct prctl_mm_map`).

use super::stub_process::CallScript;
use crate::error::Result;
use crate::image::ProcessState;
use crate::trace::STUB_BYTES;

/// `PR_SET_MM` with `PR_SET_MM_MAP`.
const PR_SET_MM_MAP: [u64; 2] = [35, 14];
/// Number of addresses in `struct prctl_mm_map`.
const ADDRESSES: usize = 11;
/// A descriptor number that leaves the executable as it is.
const SAME_EXECUTABLE: u64 = u32::MAX as u64;

/// Lets all addresses point into the stub of a process, so that arguments and environment are empty.
///
/// Whoever reads `/proc/PID/cmdline` makes the kernel look at the address of the arguments. If this address were that of
/// a stack which is unmapped, and the original's stack began less than 8 MiB above, the kernel would enlarge the original's
/// stack down to the address.
pub(super) fn point_memory_fields_into_stub(script: &mut CallScript, stub: u64) -> Result<()> {
    let mut addresses = [stub; ADDRESSES];
    // The kernel refuses an empty range of code.
    addresses[1] = stub + STUB_BYTES;
    set_memory_fields(script, &addresses, &[], SAME_EXECUTABLE)
}

/// Sets the original's addresses, its auxiliary vector and its executable, a descriptor that is closed afterwards.
pub(super) fn add_original_memory_fields(
    script: &mut CallScript,
    state: &ProcessState,
    executable: u64,
) -> Result<()> {
    let fields = &state.memory;
    set_memory_fields(script, &fields.addresses, &fields.auxiliary, executable)?;
    script.add_call("close", libc::SYS_close, &[executable]);
    Ok(())
}

fn set_memory_fields(
    script: &mut CallScript,
    addresses: &[u64; ADDRESSES],
    auxiliary: &[u8],
    executable: u64,
) -> Result<()> {
    let auxiliary_address = match auxiliary {
        [] => 0,
        bytes => script.add_bytes(bytes)?,
    };
    let mut words = addresses.to_vec();
    words.push(auxiliary_address);
    words.push(auxiliary.len() as u64 | executable << 32);
    let map = script.add_words(&words)?;
    let [option, kind] = PR_SET_MM_MAP;
    let arguments = [option, kind, map, words.len() as u64 * 8, 0];
    script.add_call("PR_SET_MM_MAP", libc::SYS_prctl, &arguments);
    Ok(())
}
