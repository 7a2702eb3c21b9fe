//! Descriptors of processes from the kernel's iterator, converted to the types of `sys`.

use holdfast_bpf::files::{Descriptor, Lister, bits};
use holdfast_sys::process::files::{FdInfo, Listed, Listing, Watches};
use rustix::fs::OFlags;

/// Lists all descriptors of a process in one pass, if the kernel supports it.
pub struct Descriptors {
    lister: Option<Lister>,
}

impl Descriptors {
    /// Loads the iterator. A kernel without support only costs time, because `/proc` is read instead.
    #[must_use]
    pub fn new() -> Self {
        let lister = Lister::load();
        if let Err(error) = &lister {
            tracing::warn!(%error, "descriptors cannot be listed many at once: freezes of processes take longer");
        }
        Self {
            lister: lister.ok(),
        }
    }

    /// Returns the descriptors of these processes, which should be stopped; `None` if `/proc` has to be read.
    #[must_use]
    pub fn list(&self, pids: &[i32]) -> Option<Vec<Listing>> {
        let lister = self.lister.as_ref()?;
        let listings = pids
            .iter()
            .map(|pid| Ok(listing(*pid, &lister.list(*pid)?)));
        match listings.collect::<Result<_, holdfast_bpf::Error>>() {
            Ok(listings) => Some(listings),
            Err(error) => {
                tracing::debug!(%error, "descriptors are read from /proc");
                None
            }
        }
    }
}

impl Default for Descriptors {
    fn default() -> Self {
        Self::new()
    }
}

fn listing(pid: i32, seen: &[Descriptor]) -> Listing {
    let is_own = |one: &&Descriptor| one.bits & bits::THREAD == 0;
    Listing {
        pid,
        thread_tables: !seen.iter().all(|one| is_own(&one)),
        table: seen.iter().find(is_own).map(|one| one.table),
        descriptors: seen.iter().filter(is_own).map(listed).collect(),
    }
}

fn listed(seen: &Descriptor) -> Listed {
    Listed {
        number: seen.fd,
        file: seen.file,
        info: FdInfo {
            offset: u64::try_from(seen.position).unwrap_or(0),
            flags: seen.flags & !OFlags::CLOEXEC.bits(),
            close_on_exec: seen.bits & bits::CLOSE_ON_EXEC != 0,
            mount: seen.mount,
            inode: seen.inode,
            owned: seen.bits & bits::OWNER != 0,
            rest: String::new(),
        },
        has_more: seen.bits & bits::MORE != 0,
        watches: (seen.bits & bits::DIGEST != 0).then_some(Watches(seen.digest)),
    }
}
