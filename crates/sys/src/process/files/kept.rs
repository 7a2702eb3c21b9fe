//! Files of `fdinfo` that stay open because their texts are long. The kernel writes such a text repeatedly, each time
//! into a buffer twice as large, until the text fits. A file that was read once keeps its large buffer.

use super::fdinfo::FdInfo;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Spare buffer space for the growth of a set, bytes.
const MORE: usize = 16 << 10;

/// Open `fdinfo` files by process and descriptor.
#[derive(Debug, Default)]
pub struct Kept(BTreeMap<(i32, u32), (File, usize)>);

impl Kept {
    /// Opens the `fdinfo` files of these descriptors and reads each once; unreadable files are left out.
    pub fn open(descriptors: &BTreeSet<(i32, u32)>) -> Self {
        let open = |&(pid, fd): &(i32, u32)| {
            let file = File::open(format!("/proc/{pid}/fdinfo/{fd}")).ok()?;
            let mut room = MORE;
            let text = loop {
                match read(&file, room) {
                    Some(text) => break text,
                    None if room < 1 << 30 => room *= 2,
                    None => return None,
                }
            };
            Some(((pid, fd), (file, text.len() + MORE)))
        };
        Self(descriptors.iter().filter_map(open).collect())
    }

    /// Reads the present `fdinfo` of a descriptor; `None` if the caller must read it in another way.
    pub fn read(&self, pid: i32, fd: u32) -> Option<FdInfo> {
        let (file, room) = self.0.get(&(pid, fd))?;
        FdInfo::parse(&String::from_utf8_lossy(&read(file, *room)?))
    }
}

/// Returns the whole text if it is shorter than `room`.
fn read(file: &File, room: usize) -> Option<Vec<u8>> {
    let mut text = vec![0; room];
    // The kernel writes the whole text at once: a text that does not fill the buffer is complete.
    let length = file.read_at(&mut text, 0).ok()?;
    if length == 0 || length == room {
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
    fn a_set_is_read_as_it_is_now() {
        let alone = || {
            // SAFETY: this thread uses no open descriptor yet, and the other threads keep their table.
            let unshared =
                unsafe { libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_UNSHARE as i32) };
            assert_eq!(unshared, 0);
            reads_a_set();
        };
        std::thread::spawn(alone).join().expect("read");
    }

    fn reads_a_set() {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a set");
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        let at = (thread, set.as_raw_fd() as u32);
        let add = |file: &File, data| {
            let data = epoll::EventData::new_u64(data);
            epoll::add(&set, file.as_fd(), data, epoll::EventFlags::IN).expect("added");
        };
        let watched: Vec<_> = (0..400)
            .map(|_| std::io::pipe().expect("a pipe"))
            .map(|(reader, writer)| (File::from(std::os::fd::OwnedFd::from(reader)), writer))
            .collect();
        (0..300).for_each(|data| add(&watched[data].0, data as u64));
        let kept = Kept::open(&BTreeSet::from([at]));
        assert_eq!(kept.read(at.0, at.1).expect("there").epoll().len(), 300);
        (300..400).for_each(|data| add(&watched[data].0, data as u64));
        let now = kept.read(at.0, at.1).expect("there").epoll();
        assert_eq!(now.len(), 400);
        assert!((0..400).all(|data| now.iter().any(|line| line.data == data)));
        assert!(kept.read(at.0, watched[0].0.as_raw_fd() as u32).is_none());
        drop(set);
        assert!(kept.read(at.0, at.1).is_none(), "it was closed");
    }
}
