//! Starts post-copy at the acceptor: empties missing ranges and registers them with userfaultfd. `postcopy` serves the
//! faults.

use super::stub_process::StubProcess;
use super::tree_restoration::TreeRestoration;
use crate::address_ranges::AddressRanges;
use crate::error::{Context, Error, Result};
use crate::files::FdStore;
use crate::image::{MappingBacking, MemoryMapping, MissingPages, ProcessMissingPages};
use crate::postcopy;
use crate::trace::{pidfd_getfd, pidfd_open};
use std::os::fd::{AsFd, OwnedFd};

/// Missing ranges, and a `userfaultfd` for each process that has some.
#[derive(Debug, Default)]
pub(super) struct MissingPageWatch {
    pub missing: MissingPages,
    pub userfaults: Vec<OwnedFd>,
}

impl TreeRestoration {
    /// Empties the missing ranges and starts watching them.
    pub fn watch_missing_pages(&mut self, missing: MissingPages) -> Result<()> {
        self.check_not_complete()?;
        let mut userfaults = Vec::new();
        for process in &missing.processes {
            userfaults.push(watch_missing_ranges(
                self.stub_process(process.process)?,
                process,
            )?);
        }
        self.missing_pages = MissingPageWatch {
            missing,
            userfaults,
        };
        Ok(())
    }
}

fn watch_missing_ranges(
    stub_process: &StubProcess,
    process: &ProcessMissingPages,
) -> Result<OwnedFd> {
    let missing: AddressRanges = process.ranges.iter().copied().collect();
    let has_missing = |mapping: &&MemoryMapping| {
        let range: AddressRanges = [(mapping.start, mapping.end)].into_iter().collect();
        matches!(mapping.backing, MappingBacking::Anonymous(_))
            && missing.intersection(&range).iter().next().is_some()
    };
    // Watch whole mappings: watching a part splits the mapping, and the program could not move or grow it.
    let mappings: AddressRanges = (stub_process.mappings.iter().filter(has_missing))
        .map(|mapping| (mapping.start, mapping.end))
        .collect();
    if missing.difference(&mappings).iter().next().is_some() {
        return Err(Error::Image(
            "missing pages outside the mappings of their process",
        ));
    }
    // Empty the ranges before watching: discarding watched pages blocks until the daemon has read that event.
    let mut script = stub_process.script();
    for (start, end) in missing.iter() {
        let arguments = [start, end - start, libc::MADV_DONTNEED as u64];
        script.add_call("madvise", libc::SYS_madvise, &arguments);
        script.flush(stub_process)?;
    }
    stub_process.run_script(script)?;
    let userfault = open_userfaultfd(stub_process)?;
    postcopy::enable(userfault.as_fd())
        .context(|| "enabling userfaultfd for missing pages".to_owned())?;
    for (start, end) in mappings.iter() {
        postcopy::register_range(userfault.as_fd(), start, end).context(|| {
            format!(
                "registering memory of process {} with userfaultfd",
                stub_process.pid
            )
        })?;
    }
    Ok(userfault)
}

/// Opens a `userfaultfd` in the process itself, since it watches the memory of the process that opened it. The system
/// call needs a capability. A process that has given the capability up uses the device, which the restorer opens.
fn open_userfaultfd(stub_process: &StubProcess) -> Result<OwnedFd> {
    let mut script = stub_process.script();
    let flags = postcopy::USERFAULTFD_FLAGS as u64;
    let mut device = None;
    if stub_process.lowered_credentials.is_some() {
        let device_file =
            postcopy::open_device().context(|| postcopy::USERFAULTFD_DEVICE.to_owned())?;
        let number = stub_process.pass_fd(&mut script, device_file.as_fd())?;
        script.add_call(
            "USERFAULTFD_IOC_NEW",
            libc::SYS_ioctl,
            &[number, postcopy::USERFAULTFD_IOC_NEW, flags],
        );
        device = Some(number);
    } else {
        script.add_call("userfaultfd", libc::SYS_userfaultfd, &[flags]);
    }
    let made = stub_process
        .run_script(script)?
        .results
        .last()
        .copied()
        .unwrap_or(-1);
    let number = i32::try_from(made).map_err(|_| Error::Image("invalid userfaultfd number"))?;
    let copied =
        pidfd_open(stub_process.pid).and_then(|process| pidfd_getfd(process.as_fd(), number));
    let mut script = stub_process.script();
    for number in std::iter::once(number as u64).chain(device) {
        script.add_call("close", libc::SYS_close, &[number]);
    }
    stub_process.run_script(script)?;
    Ok(FdStore::move_caller_fd_up(copied?)?)
}
