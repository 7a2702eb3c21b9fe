//! Descriptors of processes from the kernel's iterator, converted to the types of `checkpoint`.

use holdfast_bpf::descriptors::{Descriptor, DescriptorLister, descriptor_flags};
use holdfast_checkpoint::files::{DescriptorListing, EpollDigest, FdInfo, ListedDescriptor};
use rustix::fs::OFlags;

/// Lists all descriptors of a process in one pass, if the kernel supports it.
pub struct ProcessDescriptorLister {
    lister: Option<DescriptorLister>,
}

impl ProcessDescriptorLister {
    /// Loads the iterator. A kernel without support only costs time, because `/proc` is read instead.
    #[must_use]
    pub fn new() -> Self {
        let lister = DescriptorLister::load();
        if let Err(error) = &lister {
            tracing::warn!(%error, "cannot list descriptors in bulk: freezes of processes take longer");
        }
        Self {
            lister: lister.ok(),
        }
    }

    /// Returns the descriptors of these processes, which should be stopped; `None` if `/proc` has to be read.
    #[must_use]
    pub fn list(&self, pids: &[i32]) -> Option<Vec<DescriptorListing>> {
        let lister = self.lister.as_ref()?;
        let listings = pids
            .iter()
            .map(|pid| Ok(listing(*pid, &lister.list(*pid)?)));
        match listings.collect::<Result<_, holdfast_bpf::Error>>() {
            Ok(listings) => Some(listings),
            Err(error) => {
                tracing::debug!(%error, "cannot list descriptors in bulk: reading /proc");
                None
            }
        }
    }
}

impl Default for ProcessDescriptorLister {
    fn default() -> Self {
        Self::new()
    }
}

fn listing(pid: i32, observed: &[Descriptor]) -> DescriptorListing {
    let is_own_table =
        |descriptor: &&Descriptor| descriptor.bits & descriptor_flags::THREAD_TABLE == 0;
    DescriptorListing {
        pid,
        thread_tables: !observed.iter().all(|one| is_own_table(&one)),
        table: observed.iter().find(is_own_table).map(|one| one.table),
        descriptors: observed
            .iter()
            .filter(is_own_table)
            .map(to_listed_descriptor)
            .collect(),
    }
}

fn to_listed_descriptor(observed: &Descriptor) -> ListedDescriptor {
    ListedDescriptor {
        number: observed.fd,
        file: observed.file,
        info: FdInfo {
            offset: u64::try_from(observed.position).unwrap_or(0),
            flags: observed.flags & !OFlags::CLOEXEC.bits(),
            close_on_exec: observed.bits & descriptor_flags::CLOSE_ON_EXEC != 0,
            mount: observed.mount,
            inode: observed.inode,
            has_owner: observed.bits & descriptor_flags::HAS_OWNER != 0,
            kind_lines: String::new(),
        },
        has_extra_lines: observed.bits & descriptor_flags::HAS_FDINFO != 0,
        epoll_digest: (observed.bits & descriptor_flags::HAS_DIGEST != 0)
            .then_some(EpollDigest(observed.digest)),
    }
}
