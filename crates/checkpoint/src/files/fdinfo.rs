//! Parser for `/proc/PID/fdinfo/N` (`proc_pid_fdinfo(5)`).

use super::image::{FileLock, LockHolder};

/// A parsed file of `fdinfo`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FdInfo {
    /// File position.
    pub offset: u64,
    /// Access mode and status flags, without close-on-exec.
    pub flags: u32,
    /// Close-on-exec flag (`FD_CLOEXEC`).
    pub close_on_exec: bool,
    /// ID of the mount that the file is on.
    pub mount: u32,
    /// Inode number of the file.
    pub inode: u64,
    /// True if the file has an owner for its signals (`F_SETOWN`). The text of `fdinfo` does not show the owner.
    pub has_owner: bool,
    /// Lines that only some kinds of files have.
    pub kind_lines: String,
}

/// An entry of an epoll set (`tfd:`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpollLine {
    /// Descriptor number by which the file was added.
    pub fd: u32,
    /// Event mask and mode flags.
    pub events: u32,
    /// Data word that the program attached (`epoll_data`).
    pub data: u64,
    /// Inode of the watched file.
    pub inode: u64,
}

/// A watch of inotify.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InotifyLine {
    /// Watch descriptor.
    pub id: i32,
    /// Device of the watched file, in the kernel's internal encoding.
    pub device: u32,
    /// Event mask and mode flags.
    pub mask: u32,
    /// Type of the file handle, and its bytes.
    pub handle: (i32, Vec<u8>),
}

impl FdInfo {
    /// Returns true if the file sends signals on events (`O_ASYNC`).
    #[must_use]
    pub fn is_async(&self) -> bool {
        self.flags & libc::O_ASYNC as u32 != 0
    }

    /// Returns true if the file sends signals on events, or an owner for such signals is set already.
    #[must_use]
    pub fn has_signal_receiver(&self) -> bool {
        self.is_async() || self.has_owner
    }

    /// Parses the text; `None` if a line is absent that every such file has.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut info = Self::default();
        let mut fields_seen = 0;
        for line in text.lines() {
            let (name, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.trim();
            let is_known = match name {
                "pos" => value
                    .parse()
                    .map(|offset: i64| info.offset = offset.max(0) as u64)
                    .is_ok(),
                "flags" => u32::from_str_radix(value, 8)
                    .map(|flags| info.flags = flags)
                    .is_ok(),
                "mnt_id" => value.parse().map(|mount| info.mount = mount).is_ok(),
                "ino" => value.parse().map(|inode| info.inode = inode).is_ok(),
                _ => {
                    info.kind_lines.push_str(line);
                    info.kind_lines.push('\n');
                    continue;
                }
            };
            if !is_known {
                return None;
            }
            fields_seen += 1;
        }
        info.close_on_exec = info.flags & libc::O_CLOEXEC as u32 != 0;
        info.flags &= !(libc::O_CLOEXEC as u32);
        (fields_seen == 4).then_some(info)
    }

    /// Returns the value of a line `name: value`.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&str> {
        self.kind_lines.lines().find_map(|line| {
            let (found, value) = line.split_once(':')?;
            (found.trim() == name).then(|| value.trim())
        })
    }

    /// Returns the value of a line as a decimal number.
    #[must_use]
    pub fn number<T: std::str::FromStr>(&self, name: &str) -> Option<T> {
        self.value(name)?.parse().ok()
    }

    /// Returns a pair of numbers in parentheses, as timers have.
    #[must_use]
    pub fn number_pair(&self, name: &str) -> Option<(u64, u64)> {
        let inside = self.value(name)?.strip_prefix('(')?.strip_suffix(')')?;
        let (seconds, rest) = inside.split_once(',')?;
        Some((seconds.trim().parse().ok()?, rest.trim().parse().ok()?))
    }

    /// Returns the entries of an epoll set, in the kernel's order.
    #[must_use]
    pub fn epoll(&self) -> Vec<EpollLine> {
        let lines = self
            .kind_lines
            .lines()
            .filter(|line| line.starts_with("tfd:"));
        lines.filter_map(epoll_line).collect()
    }

    /// Returns the watches of inotify; `None` if a line lacks the file handle of the watched file.
    #[must_use]
    pub fn inotify(&self) -> Option<Vec<InotifyLine>> {
        let lines = self
            .kind_lines
            .lines()
            .filter(|line| line.starts_with("inotify "));
        lines.map(inotify_line).collect()
    }

    /// Returns the locks taken through this descriptor; a process's record locks belong to `table`. `Err` is a lease.
    pub fn locks(&self, table: u32) -> Result<Vec<FileLock>, FileLeaseError> {
        let lines = self
            .kind_lines
            .lines()
            .filter(|line| line.starts_with("lock:"));
        lines.filter_map(|line| lock_line(line, table)).collect()
    }
}

impl FdInfo {
    /// Returns device and inode of the file as the kernel writes them for locks; `None` if the file has no lock.
    #[must_use]
    pub fn locked_file(&self) -> Option<&str> {
        let mut lines = self.kind_lines.lines();
        let line = lines.find(|line| line.starts_with("lock:"))?;
        line.split_whitespace().nth(6)
    }
}

/// Error: the descriptor has a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileLeaseError;

/// Returns the word after `name` in a line of `name value` or `name:value` pairs.
fn word<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let start = line.find(name)? + name.len();
    line[start..].split_whitespace().next()
}

fn epoll_line(line: &str) -> Option<EpollLine> {
    Some(EpollLine {
        fd: word(line, "tfd:")?.parse().ok()?,
        events: u32::from_str_radix(word(line, "events:")?, 16).ok()?,
        data: u64::from_str_radix(word(line, "data:")?, 16).ok()?,
        inode: u64::from_str_radix(word(line, "ino:")?, 16).ok()?,
    })
}

fn inotify_line(line: &str) -> Option<InotifyLine> {
    let text = word(line, "f_handle:")?;
    let handle: Option<Vec<u8>> = text
        .as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
        .collect();
    Some(InotifyLine {
        // All numbers of the line are hexadecimal.
        id: i32::from_str_radix(word(line, "wd:")?, 16).ok()?,
        device: u32::from_str_radix(word(line, "sdev:")?, 16).ok()?,
        mask: u32::from_str_radix(word(line, " mask:")?, 16).ok()?,
        handle: (
            i32::from_str_radix(word(line, "fhandle-type:")?, 16).ok()?,
            handle?,
        ),
    })
}

/// Parses a line like `lock: 1: POSIX  ADVISORY  WRITE 5403 fe:00:10003342 5 14`.
fn lock_line(line: &str, table: u32) -> Option<Result<FileLock, FileLeaseError>> {
    let mut words = line.split_whitespace().skip(2);
    let holder = match words.next()? {
        "FLOCK" => LockHolder::Flock,
        "OFDLCK" => LockHolder::OpenFile,
        "POSIX" => LockHolder::Table(table),
        "LEASE" | "DELEG" => return Some(Err(FileLeaseError)),
        _ => return None,
    };
    let write = match words.nth(1)? {
        "WRITE" => true,
        "READ" => false,
        _ => return None,
    };
    let start = words.nth(2)?.parse().ok()?;
    let end = match words.next()? {
        "EOF" => None,
        number => Some(number.parse().ok()?),
    };
    Some(Ok(FileLock {
        holder,
        write,
        start,
        end,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_lines_of_the_kernel_parse() {
        let text = "pos:\t7\nflags:\t02102002\nmnt_id:\t27\nino:\t10003342\n\
            lock:\t1: FLOCK  ADVISORY  WRITE 21758 fe:00:10003342 0 EOF\n\
            lock:\t2: POSIX  ADVISORY  READ 21758 fe:00:10003342 5 14\n";
        let info = FdInfo::parse(text).expect("parsed");
        assert_eq!((info.offset, info.mount, info.inode), (7, 27, 10_003_342));
        assert_eq!((info.flags, info.close_on_exec), (0o102002, true));
        let lock = |holder, write, start, end| FileLock {
            holder,
            write,
            start,
            end,
        };
        let expected = vec![
            lock(LockHolder::Flock, true, 0, None),
            lock(LockHolder::Table(3), false, 5, Some(14)),
        ];
        assert_eq!(info.locks(3), Ok(expected));
        let lease = FdInfo::parse(&text.replace("FLOCK  ADVISORY", "LEASE  ACTIVE"));
        assert_eq!(lease.expect("parsed").locks(3), Err(FileLeaseError));
    }

    #[test]
    fn epoll_and_inotify_lines_of_the_kernel_parse() {
        let text = "pos:\t0\nflags:\t02\nmnt_id:\t17\nino:\t1038\n\
            tfd:        4 events: 80000019 data:               4d  pos:0 ino:40e sdev:10\n\
            inotify wd:1a ino:3c4a3 sdev:fe00000 mask:80000100 ignored_mask:0 fhandle-bytes:8 \
            fhandle-type:1 f_handle:a3c4030000000000\n";
        let info = FdInfo::parse(text).expect("parsed");
        let watch = EpollLine {
            fd: 4,
            events: 0x8000_0019,
            data: 77,
            inode: 1038,
        };
        assert_eq!(info.epoll(), vec![watch]);
        let inotify = &info.inotify().expect("handles")[0];
        assert_eq!(
            (inotify.id, inotify.device, inotify.mask),
            (0x1a, 0xfe0_0000, 0x8000_0100)
        );
        assert_eq!(inotify.handle, (1, vec![0xa3, 0xc4, 3, 0, 0, 0, 0, 0]));
        let without = text.replace("fhandle-type:1", "");
        let without = FdInfo::parse(&without).expect("parsed");
        assert_eq!(without.inotify(), None);
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text: String, lines in "(pos|flags|mnt_id|ino|tfd|lock|inotify wd): [a-z0-9: ]{0,40}\n") {
            let whole = format!("pos:\t0\nflags:\t02\nmnt_id:\t17\nino:\t1\n{lines}{text}");
            if let Some(info) = FdInfo::parse(&whole) {
                let _ = (info.epoll(), info.inotify(), info.locks(0), info.number_pair("it_value"));
            }
        }
    }
}
