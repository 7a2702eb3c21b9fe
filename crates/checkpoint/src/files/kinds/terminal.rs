//! Character devices that are the same on every host, and pseudo-terminals.

use super::named_file;
use crate::files::acceptor::FdStore;
use crate::files::donor::{FileBeingSaved, OpenFileSaver, SaveResult};
use crate::files::error::{BlockReason, FilesError, FilesRefusal, StepContext};
use crate::files::image::{ByteString, FileId, ObjectId, OpenFileKind, PseudoTerminal};
use crate::files::syscalls;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD};
use rustix::fs::{Gid, Mode, OFlags, Stat, Uid, chmodat, chownat, open, stat};
use rustix::io::ioctl_fionread;
use std::os::fd::{AsFd, OwnedFd};

/// null, zero, full, random, urandom; and `/dev/tty`, the controlling terminal of each process.
const UNIVERSAL_DEVICES: [(u32, u32); 6] = [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0)];
/// `/dev/ptmx`.
const PTMX_DEVICE: (u32, u32) = (5, 2);
/// Major numbers of `/dev/pts/N`.
const PTS_MAJORS: std::ops::RangeInclusive<u32> = 136..=143;
/// Bytes of `struct termios2`.
const TERMIOS2_BYTES: usize = 44;

/// `asm-generic/ioctls.h`.
const TCGETS2: u64 = 0x802c_542a;
const TCSETS2: u64 = 0x402c_542b;
const TIOCGPTLCK: u64 = 0x8004_5439;
const TIOCSPTLCK: u64 = 0x4004_5431;
const TIOCGPKT: u64 = 0x8004_5438;
const TIOCGEXCL: u64 = 0x8004_5440;
const TIOCGWINSZ: u64 = 0x5413;
const TIOCSWINSZ: u64 = 0x5414;
const TIOCPKT: u64 = 0x5420;
const TIOCOUTQ: u64 = 0x5411;
const TIOCGPTN: u64 = 0x8004_5430;

/// Returns the refusal of a device, by its numbers.
pub fn device_reason(stat: &Stat) -> BlockReason {
    let (major, minor) = device_numbers(stat);
    BlockReason::Device(major, minor)
}

fn device_numbers(stat: &Stat) -> (u32, u32) {
    (
        rustix::fs::major(stat.st_rdev),
        rustix::fs::minor(stat.st_rdev),
    )
}

/// Saves a character device.
pub fn save_device(
    saver: &mut OpenFileSaver<'_>,
    source: &FileBeingSaved,
    stat: &Stat,
) -> SaveResult<OpenFileKind> {
    let device = device_numbers(stat);
    if device == PTMX_DEVICE {
        return save_master(saver, source);
    }
    if PTS_MAJORS.contains(&device.0) {
        let terminal = (device.0 - PTS_MAJORS.start()) * 256 + device.1;
        return save_slave(saver, source, terminal);
    }
    if !UNIVERSAL_DEVICES.contains(&device) {
        return Err(device_reason(stat).into());
    }
    let path = source.path.clone();
    named_file::verify_device(&path, device).map_err(|_| BlockReason::Unreachable)?;
    Ok(OpenFileKind::Device { path, device })
}

fn save_master(saver: &mut OpenFileSaver<'_>, source: &FileBeingSaved) -> SaveResult<OpenFileKind> {
    let fd = source.fd();
    let mut value = [0u8; 4];
    syscalls::ioctl(fd, TIOCGPTN, &mut value).with_step("TIOCGPTN")?;
    let terminal = u32::from_ne_bytes(value);
    let mut flag = |request, name: &str| {
        syscalls::ioctl(fd, request, &mut value).with_step(name)?;
        Ok::<_, FilesError>(value != [0; 4])
    };
    let locked = flag(TIOCGPTLCK, "TIOCGPTLCK")?;
    if locked {
        return Err(BlockReason::TerminalLocked.into());
    }
    let packets = flag(TIOCGPKT, "TIOCGPKT")?;
    let exclusive = flag(TIOCGEXCL, "TIOCGEXCL")?;
    // The path is resolved below the process's root: its mounts may differ from this daemon's.
    let holder = saver.open_files.list[source.open_file_index]
        .source
        .process_fd()
        .0;
    let path = format!("/proc/{holder}/root/dev/pts/{terminal}");
    let file = stat(&path).map_err(|_| BlockReason::Unreachable)?;
    // A master reports and sets the modes of its slave.
    let mut modes = [0u8; TERMIOS2_BYTES];
    syscalls::ioctl(fd, TCGETS2, &mut modes).with_step("TCGETS2")?;
    let mut window = [0u8; 8];
    syscalls::ioctl(fd, TIOCGWINSZ, &mut window).with_step("TIOCGWINSZ")?;
    if saver.frozen {
        refuse_unread(source, &path)?;
    }
    let word = |at: usize| u16::from_ne_bytes([window[at], window[at + 1]]);
    let value = PseudoTerminal {
        modes: ByteString(modes.to_vec()),
        window: [word(0), word(2), word(4), word(6)],
        locked,
        packet_mode: packets,
        exclusive,
        session: controlled_session(saver, source),
        access: (file.st_uid, file.st_gid, file.st_mode & 0o7777),
    };
    saver.image.terminals.insert(terminal, value);
    Ok(OpenFileKind::TerminalMaster { terminal })
}

/// Refuses a terminal with unread data, which cannot be copied without removing it.
fn refuse_unread(source: &FileBeingSaved, slave: &str) -> SaveResult<()> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let slave = open(slave, flags, Mode::empty()).ok();
    // Data that arrives at the slave may be echoed.
    slave.as_ref().map_or(Ok(()), flush_input)?;
    flush_input(&source.copy)?;
    if ioctl_fionread(&source.copy).with_step("FIONREAD")? > 0 {
        return Err(BlockReason::TerminalUnread.into());
    }
    let Some(slave) = slave else {
        return Ok(());
    };
    let mut waiting = [0u8; 4];
    syscalls::ioctl(slave.as_fd(), TIOCOUTQ, &mut waiting).with_step("TIOCOUTQ")?;
    if ioctl_fionread(&slave).with_step("FIONREAD")? > 0 || waiting != [0; 4] {
        return Err(BlockReason::TerminalUnread.into());
    }
    Ok(())
}

/// Makes data arrive that was written a moment ago, and is not yet counted as input: the kernel delivers such data
/// before it answers a poll for input.
fn flush_input(terminal: &OwnedFd) -> SaveResult<()> {
    let mut poll_fds = [PollFd::new(terminal, PollFlags::IN)];
    poll(&mut poll_fds, Some(&Timespec::default())).with_step("poll")?;
    Ok(())
}

/// Returns the session that the terminal controls and its foreground group, if the session is one of the tree.
fn controlled_session(saver: &OpenFileSaver<'_>, source: &FileBeingSaved) -> Option<(i32, i32)> {
    let inner = |pid: rustix::process::Pid| saver.inner_pid(pid.as_raw_nonzero().get());
    let session = inner(rustix::termios::tcgetsid(&source.copy).ok()?)?;
    let group = rustix::termios::tcgetpgrp(&source.copy)
        .ok()
        .and_then(inner);
    Some((session, group.unwrap_or(session)))
}

fn save_slave(
    saver: &OpenFileSaver<'_>,
    source: &FileBeingSaved,
    terminal: ObjectId,
) -> SaveResult<OpenFileKind> {
    // The master of the terminal must move too.
    let is_master_in_tree = saver
        .open_files
        .list
        .iter()
        .any(|open_file| open_file.info.number("tty-index") == Some(terminal));
    if !is_master_in_tree || source.link != format!("/dev/pts/{terminal}") {
        return Err(BlockReason::TerminalOutside.into());
    }
    Ok(OpenFileKind::TerminalSlave { terminal })
}

/// Makes a terminal with its former number, and sets its owner and permissions.
pub fn make_master(
    store: &mut FdStore,
    id: FileId,
    terminal: ObjectId,
    flags: u32,
) -> Result<(), FilesError> {
    let fd = master_with_number(terminal)?;
    let value = store.image.terminals[&terminal].clone();
    // The terminal stays unlocked until its slaves are open.
    syscalls::ioctl(fd.as_fd(), TIOCSPTLCK, &mut [0; 4]).with_step("TIOCSPTLCK")?;
    let path = format!("/dev/pts/{terminal}");
    let (uid, gid, mode) = value.access;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    chownat(CWD, path.as_str(), Some(uid), Some(gid), AtFlags::empty()).with_step(&path)?;
    chmodat(
        CWD,
        path.as_str(),
        Mode::from_raw_mode(mode),
        AtFlags::empty(),
    )
    .with_step(&path)?;
    syscalls::set_status(fd.as_fd(), flags & !(libc::O_ASYNC as u32)).with_step("F_SETFL")?;
    store.insert(id, fd)
}

/// Opens a master with this number. The kernel assigns the lowest free number, so the lower ones are taken for a
/// moment.
fn master_with_number(terminal: ObjectId) -> Result<OwnedFd, FilesError> {
    let mut lower = Vec::new();
    loop {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let fd = open("/dev/ptmx", flags, Mode::empty()).with_step("/dev/ptmx")?;
        let mut number = [0u8; 4];
        syscalls::ioctl(fd.as_fd(), TIOCGPTN, &mut number).with_step("TIOCGPTN")?;
        match u32::from_ne_bytes(number).cmp(&terminal) {
            std::cmp::Ordering::Less => lower.push(fd),
            std::cmp::Ordering::Equal => return Ok(fd),
            std::cmp::Ordering::Greater => return Err(FilesRefusal::TerminalTaken(terminal).into()),
        }
    }
}

/// Opens the slave of a terminal after its master is made.
pub fn make_slave(
    store: &mut FdStore,
    id: FileId,
    terminal: ObjectId,
    flags: u32,
) -> Result<(), FilesError> {
    let fd = named_file::open(slave_path(terminal), flags)?;
    store.insert(id, fd)
}

fn slave_path(terminal: ObjectId) -> String {
    format!("/dev/pts/{terminal}")
}

/// Opens the slave of a terminal in this process's mount namespace, without making it a controlling terminal.
///
/// # Errors
/// The kernel's refusal.
pub fn open_slave(terminal: ObjectId) -> Result<OwnedFd, FilesError> {
    named_file::open(slave_path(terminal), libc::O_RDWR as u32)
}

/// Sets the state of a terminal through its master. The session leader itself takes the terminal as its controlling
/// one.
pub fn set_terminal_state(master: &OwnedFd, terminal: &PseudoTerminal) -> Result<(), FilesError> {
    let fd = master.as_fd();
    let malformed = || std::io::Error::from(std::io::ErrorKind::InvalidData);
    let modes = terminal.modes.0.as_slice();
    let mut modes: [u8; TERMIOS2_BYTES] = modes
        .try_into()
        .map_err(|_| malformed())
        .with_step("TCSETS2")?;
    syscalls::ioctl(fd, TCSETS2, &mut modes).with_step("TCSETS2")?;
    let mut window = [0u8; 8];
    for (at, value) in terminal.window.iter().enumerate() {
        window[at * 2..at * 2 + 2].copy_from_slice(&value.to_ne_bytes());
    }
    syscalls::ioctl(fd, TIOCSWINSZ, &mut window).with_step("TIOCSWINSZ")?;
    let mut packets = i32::from(terminal.packet_mode).to_ne_bytes();
    syscalls::ioctl(fd, TIOCPKT, &mut packets).with_step("TIOCPKT")?;
    if terminal.exclusive {
        rustix::termios::ioctl_tiocexcl(master).with_step("TIOCEXCL")?;
    }
    let mut locked = i32::from(terminal.locked).to_ne_bytes();
    syscalls::ioctl(fd, TIOCSPTLCK, &mut locked).with_step("TIOCSPTLCK")
}
