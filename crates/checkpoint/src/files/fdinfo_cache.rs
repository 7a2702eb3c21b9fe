//! Files of `fdinfo` that stay open because their texts are long. The kernel writes such a text repeatedly, each time
//! into a buffer twice as large, until the text fits. A file that was read once keeps its large buffer.

use super::fdinfo::FdInfo;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Spare buffer space for the growth of a set, bytes.
const GROWTH_BYTES: usize = 16 << 10;

/// Open `fdinfo` files by process and descriptor.
#[derive(Debug, Default)]
pub struct FdInfoCache(BTreeMap<(i32, u32), (File, usize)>);

impl FdInfoCache {
    /// Opens the `fdinfo` files of these descriptors and reads each once; unreadable files are left out.
    pub fn open(descriptors: &BTreeSet<(i32, u32)>) -> Self {
        let open = |&(pid, fd): &(i32, u32)| {
            let file = File::open(format!("/proc/{pid}/fdinfo/{fd}")).ok()?;
            let mut buffer_bytes = GROWTH_BYTES;
            let text = loop {
                match read(&file, buffer_bytes) {
                    Some(text) => break text,
                    None if buffer_bytes < 1 << 30 => buffer_bytes *= 2,
                    None => return None,
                }
            };
            Some(((pid, fd), (file, text.len() + GROWTH_BYTES)))
        };
        Self(descriptors.iter().filter_map(open).collect())
    }

    /// Reads the present `fdinfo` of a descriptor; `None` if the caller must read it in another way.
    pub fn read(&self, pid: i32, fd: u32) -> Option<FdInfo> {
        let (file, buffer_bytes) = self.0.get(&(pid, fd))?;
        FdInfo::parse(&String::from_utf8_lossy(&read(file, *buffer_bytes)?))
    }
}

/// Returns the whole text if it is shorter than `buffer_bytes`.
fn read(file: &File, buffer_bytes: usize) -> Option<Vec<u8>> {
    let mut text = vec![0; buffer_bytes];
    // The kernel writes the whole text at once: a text that does not fill the buffer is complete.
    let length = file.read_at(&mut text, 0).ok()?;
    if length == 0 || length == buffer_bytes {
        return None;
    }
    text.truncate(length);
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::epoll;
    use std::os::fd::{AsFd, AsRawFd};

    /// The test runs in a thread with a descriptor table of its own: another test's thread would reuse numbers that are
    /// closed here.
    #[test]
    fn cached_epoll_set_shows_current_entries() {
        let test_thread = || {
            // SAFETY: this thread uses no open descriptor yet, and the other threads keep their table.
            let unshared =
                unsafe { libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_UNSHARE as i32) };
            assert_eq!(unshared, 0);
            check_cached_epoll_set();
        };
        std::thread::spawn(test_thread).join().expect("read");
    }

    fn check_cached_epoll_set() {
        let epoll_set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a set");
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        let process_fd = (thread, epoll_set.as_raw_fd() as u32);
        let add = |file: &File, data| {
            let data = epoll::EventData::new_u64(data);
            epoll::add(&epoll_set, file.as_fd(), data, epoll::EventFlags::IN).expect("added");
        };
        let watched: Vec<_> = (0..400)
            .map(|_| std::io::pipe().expect("a pipe"))
            .map(|(reader, writer)| (File::from(std::os::fd::OwnedFd::from(reader)), writer))
            .collect();
        (0..300).for_each(|data| add(&watched[data].0, data as u64));
        let cache = FdInfoCache::open(&BTreeSet::from([process_fd]));
        assert_eq!(
            cache
                .read(process_fd.0, process_fd.1)
                .expect("there")
                .epoll()
                .len(),
            300
        );
        (300..400).for_each(|data| add(&watched[data].0, data as u64));
        let current = cache
            .read(process_fd.0, process_fd.1)
            .expect("there")
            .epoll();
        assert_eq!(current.len(), 400);
        assert!((0..400).all(|data| current.iter().any(|line| line.data == data)));
        assert!(
            cache
                .read(process_fd.0, watched[0].0.as_raw_fd() as u32)
                .is_none()
        );
        drop(epoll_set);
        assert!(
            cache.read(process_fd.0, process_fd.1).is_none(),
            "the descriptor was closed"
        );
    }
}
