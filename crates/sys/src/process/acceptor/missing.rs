//! Preparation of post-copy: missing ranges are emptied and watched before the processes run.

use super::husk::Husk;
use super::plan::Restoration;
use crate::process::error::{Context, Error, Result};
use crate::process::files::Stock;
use crate::process::following;
use crate::process::image::{Backing, Mapping, Missing, MissingOf};
use crate::process::ranges::Ranges;
use crate::process::trace::{pidfd_getfd, pidfd_open};
use std::os::fd::{AsFd, OwnedFd};

/// Missing ranges, and a `userfaultfd` for each process that has some.
#[derive(Debug, Default)]
pub(super) struct Watched {
    pub missing: Missing,
    pub userfaults: Vec<OwnedFd>,
}

impl Restoration {
    /// Empties the missing ranges and starts watching them.
    pub fn missing(&mut self, missing: Missing) -> Result<()> {
        self.is_open()?;
        let mut userfaults = Vec::new();
        for of in &missing.processes {
            userfaults.push(watch(self.husk(of.process)?, of)?);
        }
        self.watched = Watched {
            missing,
            userfaults,
        };
        Ok(())
    }
}

fn watch(husk: &Husk, of: &MissingOf) -> Result<OwnedFd> {
    let missing: Ranges = of.ranges.iter().copied().collect();
    let lacks = |mapping: &&Mapping| {
        let whole: Ranges = [(mapping.start, mapping.end)].into_iter().collect();
        matches!(mapping.backing, Backing::Anonymous(_))
            && missing.and(&whole).iter().next().is_some()
    };
    // Watch whole mappings: watching a part splits the mapping, and the program could not move or grow it.
    let mappings: Ranges = (husk.mappings.iter().filter(lacks))
        .map(|mapping| (mapping.start, mapping.end))
        .collect();
    if missing.minus(&mappings).iter().next().is_some() {
        return Err(Error::Image("memory that follows where nothing is mapped"));
    }
    // Empty the ranges before watching: discarding watched pages blocks until the daemon has read that event.
    let mut script = husk.script();
    for (start, end) in missing.iter() {
        let arguments = [start, end - start, libc::MADV_DONTNEED as u64];
        script.call("madvise", libc::SYS_madvise, &arguments);
        script.flush(husk)?;
    }
    husk.run(script)?;
    let userfault = open(husk)?;
    following::start(userfault.as_fd()).context(|| "userfaultfd for missing pages".to_owned())?;
    for (start, end) in mappings.iter() {
        following::register(userfault.as_fd(), start, end)
            .context(|| format!("watching memory of process {}", husk.pid))?;
    }
    Ok(userfault)
}

/// Opens a `userfaultfd` in the process itself, since it watches the memory of the process that opened it. The system
/// call needs a capability. A process that has given the capability up uses the device, which the restorer opens.
fn open(husk: &Husk) -> Result<OwnedFd> {
    let mut script = husk.script();
    let flags = following::OPEN as u64;
    let mut device = None;
    if husk.who.is_some() {
        let opened = following::open_device().context(|| following::DEVICE.to_owned())?;
        let number = husk.receive(&mut script, opened.as_fd())?;
        script.call(
            "USERFAULTFD_IOC_NEW",
            libc::SYS_ioctl,
            &[number, following::NEW, flags],
        );
        device = Some(number);
    } else {
        script.call("userfaultfd", libc::SYS_userfaultfd, &[flags]);
    }
    let made = husk.run(script)?.results.last().copied().unwrap_or(-1);
    let number = i32::try_from(made).map_err(|_| Error::Image("a descriptor"))?;
    let copied = pidfd_open(husk.pid).and_then(|process| pidfd_getfd(process.as_fd(), number));
    let mut script = husk.script();
    for number in std::iter::once(number as u64).chain(device) {
        script.call("close", libc::SYS_close, &[number]);
    }
    husk.run(script)?;
    Ok(Stock::lift_own(copied?)?)
}
