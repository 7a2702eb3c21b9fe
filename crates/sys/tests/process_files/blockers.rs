//! Blockers of a move are reported, each kind with its reason.

use crate::harness::{Donor, fork, put, stop};
use holdfast_sys::process::files::{Draft, Limits};
use rustix::event::EventfdFlags;
use rustix::event::epoll::CreateFlags;
use rustix::fs::MemfdFlags;
use rustix::net::{AddressFamily, Protocol, SocketType, socket, socket_with};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Returns the blockers of a process with one descriptor, at number 10.
fn blockers(hold: impl FnOnce() -> OwnedFd) -> Vec<String> {
    let donor = Donor::new(|| {
        put(hold(), 10);
        stop();
    });
    donor.blockers()
}

fn only(found: &[String], reason: &str) {
    assert!(
        found.len() == 1 && found[0].starts_with(reason),
        "{found:?}"
    );
    assert!(found[0].contains("descriptor 10 ("), "{found:?}");
}

/// Returns the new descriptor of a system call.
fn made(number: libc::c_long, arguments: [usize; 4]) -> OwnedFd {
    let [one, two, three, four] = arguments;
    // All arguments are passed, because an omitted one would be whatever a register holds.
    // SAFETY: the callers pass numbers, and pointers to memory that outlives the call.
    let fd = unsafe { libc::syscall(number, one, two, three, four, 0_usize) };
    assert!(
        fd >= 0,
        "system call {number}: {}",
        std::io::Error::last_os_error()
    );
    // SAFETY: the call succeeded, so this is a new descriptor that nothing else owns.
    unsafe { OwnedFd::from_raw_fd(fd as i32) }
}

#[test]
fn an_io_uring() {
    let parameters = [0u64; 16];
    let found = blockers(|| {
        made(
            libc::SYS_io_uring_setup,
            [4, parameters.as_ptr() as usize, 0, 0],
        )
    });
    only(&found, "IoUring");
}

#[test]
fn a_pipe_with_an_owner_outside_the_tree() {
    let found = blockers(|| {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        put(writer, 11);
        // SAFETY: no pointers are passed.
        assert_eq!(0, unsafe {
            libc::fcntl(reader.as_raw_fd(), libc::F_SETOWN, libc::getppid())
        });
        reader.into()
    });
    only(&found, "OwnerOutside");
}

#[test]
fn a_packet_socket() {
    let found = blockers(|| socket(AddressFamily::PACKET, SocketType::RAW, None).expect("socket"));
    only(&found, "Family(17)");
}

#[test]
fn a_vsock() {
    let family = AddressFamily::from_raw(libc::AF_VSOCK as u16);
    let found = blockers(|| socket(family, SocketType::STREAM, None).expect("socket"));
    only(&found, "Family(40)");
}

#[test]
fn a_netlink_socket_of_another_protocol() {
    let protocol = Some(rustix::net::netlink::KOBJECT_UEVENT);
    let found =
        blockers(|| socket(AddressFamily::NETLINK, SocketType::RAW, protocol).expect("socket"));
    only(&found, "Protocol(15, 16)");
}

#[test]
fn a_raw_socket() {
    let protocol = Some(rustix::net::ipproto::ICMP);
    let found =
        blockers(|| socket(AddressFamily::INET, SocketType::RAW, protocol).expect("socket"));
    only(&found, "Protocol(1, 2)");
}

#[test]
fn multipath_tcp() {
    let number = std::num::NonZeroU32::new(libc::IPPROTO_MPTCP as u32).expect("a protocol");
    let protocol = Some(Protocol::from_raw(number));
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let make = || socket_with(AddressFamily::INET, SocketType::STREAM, flags, protocol);
    let found = blockers(|| make().expect("socket"));
    only(&found, "Mptcp");
}

#[test]
fn a_pidfd_of_a_process_that_stays() {
    let own = std::process::id() as usize;
    let found = blockers(|| made(libc::SYS_pidfd_open, [own, 0, 0, 0]));
    only(&found, "PidfdOutside");
}

#[test]
fn a_pidfd_of_a_process_that_was_waited_for() {
    let found = blockers(|| {
        let mut child = std::process::Command::new("true").spawn().expect("starts");
        let fd = made(libc::SYS_pidfd_open, [child.id() as usize, 0, 0, 0]);
        child.wait().expect("ended");
        fd
    });
    only(&found, "PidfdEnded");
}

#[test]
fn a_pidfd_of_a_thread() {
    let thread = rustix::process::PidfdFlags::from_bits_retain(libc::O_EXCL as u32);
    if let Err(error) = rustix::process::pidfd_open(rustix::process::getpid(), thread) {
        eprintln!("this kernel has no PIDFD_THREAD: {error}");
        return;
    }
    let found = blockers(|| {
        let own = std::process::id() as usize;
        made(libc::SYS_pidfd_open, [own, libc::O_EXCL as usize, 0, 0])
    });
    only(&found, "PidfdOfThread");
}

#[test]
fn fanotify() {
    let found = blockers(|| made(libc::SYS_fanotify_init, [0, 0, 0, 0]));
    only(&found, "Fanotify");
}

#[test]
fn a_performance_counter() {
    // `struct perf_event_attr`: software event, size, CPU clock.
    let mut attributes = [0u32; 32];
    (attributes[0], attributes[1]) = (1, 128);
    let pointer = attributes.as_ptr() as usize;
    let found = blockers(|| {
        made(
            libc::SYS_perf_event_open,
            [pointer, 0, usize::MAX, usize::MAX],
        )
    });
    only(&found, "Perf");
}

#[test]
fn a_map_of_ebpf() {
    // `BPF_MAP_CREATE` of an array: key 4 bytes, value 4 bytes, one entry.
    let attributes = [2u32, 4, 4, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let pointer = attributes.as_ptr() as usize;
    let found = blockers(|| made(libc::SYS_bpf, [0, pointer, 72, 0]));
    only(&found, "Bpf");
}

#[test]
fn a_posix_message_queue() {
    let name = format!("holdfast-test-{}", std::process::id());
    let name = std::ffi::CString::new(name).expect("a name");
    let found = blockers(|| {
        let flags = (libc::O_RDWR | libc::O_CREAT) as usize;
        made(libc::SYS_mq_open, [name.as_ptr() as usize, flags, 0o600, 0])
    });
    // SAFETY: the name outlives the call.
    unsafe { libc::syscall(libc::SYS_mq_unlink, name.as_ptr()) };
    only(&found, "MessageQueue");
}

#[test]
fn a_directory_that_a_signal_tells_of() {
    let directory = tempfile::tempdir().expect("made");
    let found = blockers(|| {
        let file = File::open(directory.path()).expect("open");
        // `DN_CREATE | DN_MULTISHOT`; the signal is ignored unless the process handles it.
        let asked = 1 << 31 | 4_u32;
        // SAFETY: no pointers are passed.
        let outcome = unsafe {
            libc::signal(libc::SIGIO, libc::SIG_IGN);
            libc::fcntl(file.as_raw_fd(), libc::F_NOTIFY, asked)
        };
        assert_eq!(outcome, 0);
        file.into()
    });
    only(&found, "DirectoryNotify");
}

/// Nameless objects that are shared with a process outside the tree are found.
#[test]
fn what_a_process_outside_has_too() {
    let memory = || rustix::fs::memfd_create("shared", MemfdFlags::CLOEXEC).expect("made");
    let deleted = || tempfile::tempfile().expect("made");
    let timer = || {
        let clock = rustix::time::TimerfdClockId::Monotonic;
        rustix::time::timerfd_create(clock, rustix::time::TimerfdFlags::CLOEXEC).expect("made")
    };
    let make: [&dyn Fn() -> OwnedFd; 7] = [
        &|| rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("made"),
        &timer,
        &|| {
            made(
                libc::SYS_signalfd4,
                [usize::MAX, [1u64].as_ptr() as usize, 8, 0],
            )
        },
        &|| rustix::event::epoll::create(CreateFlags::CLOEXEC).expect("made"),
        &|| rustix::fs::inotify::init(rustix::fs::inotify::CreateFlags::CLOEXEC).expect("made"),
        &memory,
        &|| deleted().into(),
    ];
    for make in make {
        // Two objects of the same kind, none of them shared.
        let donor = Donor::new(|| {
            put(make(), 10);
            put(make(), 11);
            stop();
        });
        assert!(donor.blockers().is_empty(), "{:?}", donor.blockers());
        let pid = donor.pids()[0];
        // The outside process copies the descriptor itself: a copy in the test process would be inherited by each
        // child that another test starts.
        let stranger = Donor::new(|| {
            put(donor.copy(10), 10);
            stop();
        });
        let expected = format!("HeldOutside({})", stranger.pids()[0]);
        only(&donor.blockers(), &expected);
        drop(stranger);
        assert!(donor.blockers().is_empty());
        assert_eq!(donor.pids(), [pid]);
    }
}

#[test]
fn userfaultfd() {
    let found = blockers(|| {
        made(
            libc::SYS_userfaultfd,
            [libc::O_CLOEXEC as usize | 1, 0, 0, 0],
        )
    });
    only(&found, "Userfaultfd");
}

#[test]
fn a_namespace() {
    let found = blockers(|| File::open("/proc/self/ns/net").expect("open").into());
    only(&found, "Namespace");
}

#[test]
fn a_device_file() {
    let found = blockers(|| File::open("/dev/kmsg").expect("open").into());
    only(&found, "Device(1, 11)");
}

#[test]
fn a_pipe_to_a_process_that_stays() {
    let (_reader, writer) = std::io::pipe().expect("pipe");
    let donor = Donor::keeping(|| writer.into());
    only(
        &donor.blockers(),
        &format!("OtherEndOutside(Some({}", std::process::id()),
    );
}

#[test]
fn a_connection_to_a_process_that_stays() {
    let (_near, far) = UnixStream::pair().expect("pair");
    let donor = Donor::keeping(|| far.into());
    let found = donor.blockers();
    assert!(found[0].starts_with("OtherEndOutside(Some("), "{found:?}");
}

#[test]
fn a_terminal_whose_master_stays() {
    use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
    unlockpt(&master).expect("unlocked");
    let name = ptsname(&master, Vec::new()).expect("name");
    let path = name.to_str().expect("text").to_string();
    let found = blockers(|| {
        File::options()
            .read(true)
            .write(true)
            .open(&path)
            .expect("open")
            .into()
    });
    only(&found, "TerminalOutside");
}

#[test]
fn a_lease() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("leased");
    std::fs::write(&path, "").expect("written");
    let found = blockers(|| {
        let file = OwnedFd::from(File::open(&path).expect("open"));
        let raw = std::os::fd::AsRawFd::as_raw_fd(&file);
        // SAFETY: no pointers are passed.
        let outcome = unsafe { libc::fcntl(raw, libc::F_SETLEASE, libc::F_RDLCK) };
        assert_eq!(outcome, 0);
        file
    });
    only(&found, "Lease");
}

#[test]
fn a_file_without_a_name_that_is_too_large() {
    let limits = Limits {
        content_bytes_max: 1000,
        ..Limits::default()
    };
    let donor = Donor::new(|| {
        let memory = rustix::fs::memfd_create("large", rustix::fs::MemfdFlags::CLOEXEC);
        let memory = memory.expect("made");
        rustix::fs::ftruncate(&memory, 1001).expect("size");
        put(memory, 10);
        stop();
    });
    let error = Draft::save(&donor.pids(), &limits)
        .expect_err("refused")
        .to_string();
    assert!(
        error.contains("1001 bytes, more than the limit of 1000"),
        "{error}"
    );
    assert!(donor.blockers().is_empty());
}

#[test]
fn a_set_that_watches_what_others_have() {
    use rustix::event::epoll;
    let donor = Donor::new(|| {
        let set = epoll::create(epoll::CreateFlags::empty()).expect("made");
        let event = made(libc::SYS_eventfd2, [0, 0, 0, 0]);
        let data = epoll::EventData::new_u64(1);
        epoll::add(&set, &event, data, epoll::EventFlags::IN).expect("added");
        put(set, 10);
        // A child outside the tree keeps the eventfd open.
        if fork().is_none() {
            stop();
        }
        drop(event);
        stop();
    });
    let pid = donor.pids()[0];
    let draft = Draft::save(&[pid], &Limits::default()).expect("saved while it may close it");
    let error = draft.save_frozen(&[pid]).expect_err("refused").to_string();
    assert!(
        error.contains("whose file is not open in the tree"),
        "{error}"
    );
}

#[test]
fn all_blockers_are_named_at_once() {
    let donor = Donor::new(|| {
        put(File::open("/dev/kmsg").expect("open"), 10);
        put(made(libc::SYS_fanotify_init, [0, 0, 0, 0]), 12);
        stop();
    });
    let found = donor.blockers();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[1].contains("descriptor 12 (anon_inode:[fanotify])"),
        "{found:?}"
    );
}

#[test]
fn a_terminal_with_something_to_read() {
    use rustix::pty::{OpenptFlags, openpt, unlockpt};
    let donor = Donor::new(|| {
        put(
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal"),
            10,
        );
        unlockpt(crate::harness::at(10)).expect("unlocked");
        stop();
        rustix::io::write(crate::harness::at(10), b"typed\n").expect("written");
        stop();
    });
    let draft = donor.draft();
    donor.run_on();
    let error = draft
        .save_frozen(&donor.pids())
        .expect_err("refused")
        .to_string();
    assert!(
        error.contains("input or output that was not read"),
        "{error}"
    );
}

#[test]
fn a_terminal_that_is_locked() {
    use rustix::pty::{OpenptFlags, openpt};
    let donor = Donor::new(|| {
        put(
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal"),
            10,
        );
        stop();
    });
    let found = donor.blockers();
    assert!(
        found.len() == 1 && found[0].contains("slave is locked"),
        "{found:?}"
    );
}
