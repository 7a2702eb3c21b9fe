//! Blockers of a move are reported, each kind with its reason.

use crate::harness::{Donor, fork_child, put_at, stop_self};
use holdfast_checkpoint::files::{FilesSnapshot, SaveLimits};
use rustix::event::EventfdFlags;
use rustix::event::epoll::CreateFlags;
use rustix::fs::MemfdFlags;
use rustix::net::{AddressFamily, Protocol, SocketType, socket, socket_with};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Returns the blockers of a process with one descriptor, at number 10.
fn blockers_of(hold: impl FnOnce() -> OwnedFd) -> Vec<String> {
    let donor = Donor::new(|| {
        put_at(hold(), 10);
        stop_self();
    });
    donor.blockers()
}

fn assert_only(found: &[String], reason: &str) {
    assert!(
        found.len() == 1 && found[0].starts_with(reason),
        "{found:?}"
    );
    assert!(found[0].contains("descriptor 10 ("), "{found:?}");
}

/// Returns the new descriptor of a system call.
fn fd_from_syscall(number: libc::c_long, arguments: [usize; 4]) -> OwnedFd {
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
fn io_uring_is_refused() {
    let parameters = [0u64; 16];
    let found = blockers_of(|| {
        fd_from_syscall(
            libc::SYS_io_uring_setup,
            [4, parameters.as_ptr() as usize, 0, 0],
        )
    });
    assert_only(&found, "IoUring");
}

#[test]
fn pipe_with_outside_owner_is_refused() {
    let found = blockers_of(|| {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        put_at(writer, 11);
        // SAFETY: no pointers are passed.
        assert_eq!(0, unsafe {
            libc::fcntl(reader.as_raw_fd(), libc::F_SETOWN, libc::getppid())
        });
        reader.into()
    });
    assert_only(&found, "OwnerOutside");
}

#[test]
fn packet_socket_is_refused() {
    let found =
        blockers_of(|| socket(AddressFamily::PACKET, SocketType::RAW, None).expect("socket"));
    assert_only(&found, "Family(17)");
}

#[test]
fn vsock_is_refused() {
    let family = AddressFamily::from_raw(libc::AF_VSOCK as u16);
    let found = blockers_of(|| socket(family, SocketType::STREAM, None).expect("socket"));
    assert_only(&found, "Family(40)");
}

#[test]
fn uevent_netlink_socket_is_refused() {
    let protocol = Some(rustix::net::netlink::KOBJECT_UEVENT);
    let found =
        blockers_of(|| socket(AddressFamily::NETLINK, SocketType::RAW, protocol).expect("socket"));
    assert_only(&found, "Protocol(15, 16)");
}

#[test]
fn raw_socket_is_refused() {
    let protocol = Some(rustix::net::ipproto::ICMP);
    let found =
        blockers_of(|| socket(AddressFamily::INET, SocketType::RAW, protocol).expect("socket"));
    assert_only(&found, "Protocol(1, 2)");
}

#[test]
fn multipath_tcp_is_refused() {
    let number = std::num::NonZeroU32::new(libc::IPPROTO_MPTCP as u32).expect("a protocol");
    let protocol = Some(Protocol::from_raw(number));
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let make = || socket_with(AddressFamily::INET, SocketType::STREAM, flags, protocol);
    let found = blockers_of(|| make().expect("socket"));
    assert_only(&found, "Mptcp");
}

#[test]
fn pidfd_of_outside_process_is_refused() {
    let own = std::process::id() as usize;
    let found = blockers_of(|| fd_from_syscall(libc::SYS_pidfd_open, [own, 0, 0, 0]));
    assert_only(&found, "PidfdOutside");
}

#[test]
fn pidfd_of_reaped_process_is_refused() {
    let found = blockers_of(|| {
        let mut child = std::process::Command::new("true").spawn().expect("starts");
        let fd = fd_from_syscall(libc::SYS_pidfd_open, [child.id() as usize, 0, 0, 0]);
        child.wait().expect("ended");
        fd
    });
    assert_only(&found, "PidfdEnded");
}

#[test]
fn pidfd_of_thread_is_refused() {
    let thread = rustix::process::PidfdFlags::from_bits_retain(libc::O_EXCL as u32);
    if let Err(error) = rustix::process::pidfd_open(rustix::process::getpid(), thread) {
        eprintln!("this kernel has no PIDFD_THREAD: {error}");
        return;
    }
    let found = blockers_of(|| {
        let own = std::process::id() as usize;
        fd_from_syscall(libc::SYS_pidfd_open, [own, libc::O_EXCL as usize, 0, 0])
    });
    assert_only(&found, "PidfdOfThread");
}

#[test]
fn fanotify_is_refused() {
    let found = blockers_of(|| fd_from_syscall(libc::SYS_fanotify_init, [0, 0, 0, 0]));
    assert_only(&found, "Fanotify");
}

#[test]
fn performance_counter_is_refused() {
    // `struct perf_event_attr`: software event, size, CPU clock.
    let mut attributes = [0u32; 32];
    (attributes[0], attributes[1]) = (1, 128);
    let pointer = attributes.as_ptr() as usize;
    let found = blockers_of(|| {
        fd_from_syscall(
            libc::SYS_perf_event_open,
            [pointer, 0, usize::MAX, usize::MAX],
        )
    });
    assert_only(&found, "Perf");
}

#[test]
fn ebpf_map_is_refused() {
    // `BPF_MAP_CREATE` of an array: key 4 bytes, value 4 bytes, one entry.
    let attributes = [2u32, 4, 4, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let pointer = attributes.as_ptr() as usize;
    let found = blockers_of(|| fd_from_syscall(libc::SYS_bpf, [0, pointer, 72, 0]));
    assert_only(&found, "Bpf");
}

#[test]
fn posix_message_queue_is_refused() {
    let name = format!("holdfast-test-{}", std::process::id());
    let name = std::ffi::CString::new(name).expect("a name");
    let found = blockers_of(|| {
        let flags = (libc::O_RDWR | libc::O_CREAT) as usize;
        fd_from_syscall(libc::SYS_mq_open, [name.as_ptr() as usize, flags, 0o600, 0])
    });
    // SAFETY: the name outlives the call.
    unsafe { libc::syscall(libc::SYS_mq_unlink, name.as_ptr()) };
    assert_only(&found, "MessageQueue");
}

#[test]
fn dnotify_directory_is_refused() {
    let directory = tempfile::tempdir().expect("made");
    let found = blockers_of(|| {
        let file = File::open(directory.path()).expect("open");
        // `DN_CREATE | DN_MULTISHOT`; the signal is ignored unless the process handles it.
        let notify_flags = 1 << 31 | 4_u32;
        // SAFETY: no pointers are passed.
        let outcome = unsafe {
            libc::signal(libc::SIGIO, libc::SIG_IGN);
            libc::fcntl(file.as_raw_fd(), libc::F_NOTIFY, notify_flags)
        };
        assert_eq!(outcome, 0);
        file.into()
    });
    assert_only(&found, "DirectoryNotify");
}

/// Nameless objects that are shared with a process outside the tree are found.
#[test]
fn objects_shared_with_outside_process_are_refused() {
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
            fd_from_syscall(
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
            put_at(make(), 10);
            put_at(make(), 11);
            stop_self();
        });
        assert!(donor.blockers().is_empty(), "{:?}", donor.blockers());
        let pid = donor.pids()[0];
        // The outside process copies the descriptor itself: a copy in the test process would be inherited by each
        // child that another test starts.
        let outside_process = Donor::new(|| {
            put_at(donor.copy(10), 10);
            stop_self();
        });
        let expected = format!("HeldOutside({})", outside_process.pids()[0]);
        assert_only(&donor.blockers(), &expected);
        drop(outside_process);
        assert!(donor.blockers().is_empty());
        assert_eq!(donor.pids(), [pid]);
    }
}

#[test]
fn userfaultfd_is_refused() {
    let found = blockers_of(|| {
        fd_from_syscall(
            libc::SYS_userfaultfd,
            [libc::O_CLOEXEC as usize | 1, 0, 0, 0],
        )
    });
    assert_only(&found, "Userfaultfd");
}

#[test]
fn namespace_file_is_refused() {
    let found = blockers_of(|| File::open("/proc/self/ns/net").expect("open").into());
    assert_only(&found, "Namespace");
}

#[test]
fn device_file_is_refused() {
    let found = blockers_of(|| File::open("/dev/kmsg").expect("open").into());
    assert_only(&found, "Device(1, 11)");
}

#[test]
fn pipe_to_outside_process_is_refused() {
    let (_reader, writer) = std::io::pipe().expect("pipe");
    let donor = Donor::with_inherited(|| writer.into());
    assert_only(
        &donor.blockers(),
        &format!("OtherEndOutside(Some({}", std::process::id()),
    );
}

#[test]
fn unix_connection_to_outside_process_is_refused() {
    let (_near, far) = UnixStream::pair().expect("pair");
    let donor = Donor::with_inherited(|| far.into());
    let found = donor.blockers();
    assert!(found[0].starts_with("OtherEndOutside(Some("), "{found:?}");
}

#[test]
fn terminal_with_outside_master_is_refused() {
    use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
    unlockpt(&master).expect("unlocked");
    let name = ptsname(&master, Vec::new()).expect("name");
    let path = name.to_str().expect("text").to_string();
    let found = blockers_of(|| {
        File::options()
            .read(true)
            .write(true)
            .open(&path)
            .expect("open")
            .into()
    });
    assert_only(&found, "TerminalOutside");
}

#[test]
fn file_lease_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("leased");
    std::fs::write(&path, "").expect("written");
    let found = blockers_of(|| {
        let file = OwnedFd::from(File::open(&path).expect("open"));
        let raw = std::os::fd::AsRawFd::as_raw_fd(&file);
        // SAFETY: no pointers are passed.
        let outcome = unsafe { libc::fcntl(raw, libc::F_SETLEASE, libc::F_RDLCK) };
        assert_eq!(outcome, 0);
        file
    });
    assert_only(&found, "Lease");
}

#[test]
fn oversized_nameless_file_is_refused() {
    let limits = SaveLimits {
        content_bytes_max: 1000,
        ..SaveLimits::default()
    };
    let donor = Donor::new(|| {
        let memory = rustix::fs::memfd_create("large", rustix::fs::MemfdFlags::CLOEXEC);
        let memory = memory.expect("made");
        rustix::fs::ftruncate(&memory, 1001).expect("size");
        put_at(memory, 10);
        stop_self();
    });
    let error = FilesSnapshot::save(&donor.pids(), &limits)
        .expect_err("refused")
        .to_string();
    assert!(
        error.contains("1001 bytes, more than the limit of 1000"),
        "{error}"
    );
    assert!(donor.blockers().is_empty());
}

#[test]
fn epoll_set_watching_outside_file_is_refused() {
    use rustix::event::epoll;
    let donor = Donor::new(|| {
        let set = epoll::create(epoll::CreateFlags::empty()).expect("made");
        let event = fd_from_syscall(libc::SYS_eventfd2, [0, 0, 0, 0]);
        let data = epoll::EventData::new_u64(1);
        epoll::add(&set, &event, data, epoll::EventFlags::IN).expect("added");
        put_at(set, 10);
        // A child outside the tree keeps the eventfd open.
        if fork_child().is_none() {
            stop_self();
        }
        drop(event);
        stop_self();
    });
    let pid = donor.pids()[0];
    let snapshot = FilesSnapshot::save(&[pid], &SaveLimits::default())
        .expect("a snapshot, since the program may still close it");
    let error = snapshot
        .save_frozen(&[pid])
        .expect_err("refused")
        .to_string();
    assert!(
        error.contains("whose file is not open in the tree"),
        "{error}"
    );
}

#[test]
fn all_blockers_are_reported_at_once() {
    let donor = Donor::new(|| {
        put_at(File::open("/dev/kmsg").expect("open"), 10);
        put_at(fd_from_syscall(libc::SYS_fanotify_init, [0, 0, 0, 0]), 12);
        stop_self();
    });
    let found = donor.blockers();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[1].contains("descriptor 12 (anon_inode:[fanotify])"),
        "{found:?}"
    );
}

#[test]
fn terminal_with_unread_input_is_refused() {
    use rustix::pty::{OpenptFlags, openpt, unlockpt};
    let donor = Donor::new(|| {
        put_at(
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal"),
            10,
        );
        unlockpt(crate::harness::borrow_fd(10)).expect("unlocked");
        stop_self();
        rustix::io::write(crate::harness::borrow_fd(10), b"typed\n").expect("written");
        stop_self();
    });
    let snapshot = donor.snapshot();
    donor.continue_to_next_stop();
    let error = snapshot
        .save_frozen(&donor.pids())
        .expect_err("refused")
        .to_string();
    assert!(error.contains("unread input or output"), "{error}");
}

#[test]
fn locked_terminal_is_refused() {
    use rustix::pty::{OpenptFlags, openpt};
    let donor = Donor::new(|| {
        put_at(
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal"),
            10,
        );
        stop_self();
    });
    let found = donor.blockers();
    assert!(
        found.len() == 1 && found[0].contains("slave is locked"),
        "{found:?}"
    );
}
