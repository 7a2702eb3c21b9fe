//! Rights of an ordinary user's process, stated independently of the judge: each function panics if an object exceeds
//! them.

use super::{GROUP, PORT, PROGRAMS, USER};
use holdfast_sys::process::files::Image;
use holdfast_sys::process::files::image::{Kind, SocketOption, UnixName};
use holdfast_sys::process::image::{
    Backing, Credentials, Descriptors, Files, Frozen, Mapping, Run, SharedKind, Tree,
};
use holdfast_sys::process::sockets::SocketStatic;
use holdfast_sys::tcp_repair::SocketOptions;
use std::net::SocketAddr;

/// Bytes that an ordinary process may lock, by `RLIMIT_MEMLOCK` of
/// [`Here::default`](holdfast_sys::process::judge::Here).
const LOCKED_MAX: u64 = 8 << 20;
/// `RLIMIT_NOFILE` of `Here::default`.
const FILES_MAX: u64 = 1 << 19;
/// Numbers of `RLIMIT_NOFILE`, `RLIMIT_MEMLOCK`, `RLIMIT_NICE` and `RLIMIT_RTPRIO`, and their hard limits in
/// `Here::default`.
const LIMITS: [(usize, u64); 4] = [(7, FILES_MAX), (8, LOCKED_MAX), (13, 0), (14, 0)];
/// `VM_LOCKED` as represented in the image.
const LOCKED: u32 = holdfast_sys::process::procfs::Advice::LOCKED;
/// `CLOCK_REALTIME_ALARM` and `CLOCK_BOOTTIME_ALARM`.
const WAKE: [i32; 2] = [8, 9];
/// Set-user-ID and set-group-ID.
const SET_IDS: u32 = 0o6000;

fn who(of: &Credentials) {
    assert_eq!(of.uids, [USER; 4]);
    assert_eq!(of.gids, [GROUP; 4]);
    assert!(of.groups.iter().all(|group| *group == GROUP), "{of:?}");
    let [inheritable, permitted, effective, _, ambient] = of.capabilities;
    assert_eq!([inheritable, permitted, effective, ambient], [0; 4]);
    // SECBIT_KEEP_CAPS alone.
    assert!([0, 16].contains(&of.secure_bits), "{of:?}");
}

fn owner(of: (u32, u32)) {
    assert_eq!(of, (USER, GROUP));
}

pub fn tree(tree: &Tree) {
    for process in tree.processes.iter().filter(|of| of.exit_status.is_none()) {
        who(&process.credentials);
        let program = &tree.files[process.executable as usize].path;
        let program = String::from_utf8_lossy(program);
        // A list of programs may also name a program itself.
        let is_listed = program == PROGRAMS || program.starts_with(&format!("{PROGRAMS}/"));
        assert!(is_listed, "{program}");
        assert!(!program.split('/').any(|part| part == ".."), "{program}");
        let locked = process.mappings.iter().filter(|of| of.advice & LOCKED != 0);
        let locked: u128 = locked.map(|of| u128::from(of.end - of.start)).sum();
        assert!(locked <= LOCKED_MAX.into(), "{locked} bytes are locked");
    }
    for object in &tree.shared {
        if let SharedKind::SystemV(segment) = &object.kind {
            owner(segment.owner);
            owner(segment.creator);
            assert!(!segment.locked || object.size <= LOCKED_MAX, "{segment:?}");
        }
    }
}

pub fn frozen(frozen: &Frozen) {
    for process in frozen.processes.iter().flatten() {
        for thread in &process.threads {
            who(&thread.credentials);
            assert!(thread.no_new_privileges || thread.filters.is_empty());
            let scheduling = &thread.scheduling;
            // SCHED_OTHER, SCHED_BATCH, SCHED_IDLE, SCHED_EXT; or a real-time policy with priority 0, which the kernel
            // refuses.
            let ordinary = [0, 3, 5, 7].contains(&scheduling.policy);
            let nothing = [1, 2].contains(&scheduling.policy) && scheduling.priority == 0;
            assert!(ordinary || nothing, "{scheduling:?}");
            assert!(scheduling.nice >= 0, "{scheduling:?}");
            assert_ne!(thread.io_priority >> 13, 1, "real-time I/O");
        }
        assert!(process.oom_score_adjustment >= 0);
        assert_eq!(process.limits.len(), 16);
        for (resource, limit) in process.limits.iter().enumerate() {
            let most = LIMITS.iter().find(|(number, _)| *number == resource);
            let most = most.map_or(u64::MAX, |(_, most)| *most);
            assert!(
                limit.soft <= limit.hard && limit.hard <= most,
                "limit {resource}: {limit:?}"
            );
        }
        let timers = &process.posix_timers;
        assert!(timers.iter().all(|timer| !WAKE.contains(&timer.clock)));
    }
}

/// Asserts that memory is written only inside the process's own private mappings, for each page.
pub fn memory(mappings: &[Mapping], run: &Run) {
    let is_own = |mapping: &&Mapping| match &mapping.backing {
        Backing::Anonymous(_) => true,
        Backing::File { shared, .. } => !shared,
        Backing::Shared { .. } | Backing::Kernel(_) => false,
    };
    let own: Vec<&Mapping> = mappings.iter().filter(is_own).collect();
    let pages = run.length.div_ceil(4096).min(1 << 12);
    for page in 0..pages {
        let at = run.start + page * 4096;
        let held = own.iter().any(|of| of.start <= at && at < of.end);
        assert!(held, "{at:#x} is not the process's own memory");
    }
    let last = run.start.checked_add(run.length - 1).expect("no overflow");
    assert!(own.iter().any(|of| of.start <= last && last < of.end));
}

pub fn descriptors(found: &Descriptors) {
    // Changes relative to nothing equal the image; changes relative to another image are judged alike.
    if let Files::Image(image) = &found.files {
        files(image);
    }
    found.sockets.values().for_each(socket);
}

fn files(image: &Image) {
    for table in image.tables.values() {
        let (soft, hard) = table.descriptors_max;
        assert!(soft <= hard && hard <= FILES_MAX);
    }
    for file in image.files.values() {
        // The restorer is process 1, and a process group would be a negative number; neither may be the owner.
        assert!(file.owner.is_none_or(|owner| owner.pid > 1), "{file:?}");
        match &file.kind {
            Kind::Timer(timer) => assert!(!WAKE.contains(&timer.clock)),
            Kind::Epoll { watches } => {
                // EPOLLWAKEUP.
                assert!(watches.iter().all(|watch| watch.events & (1 << 29) == 0));
            }
            Kind::Unix(socket) => {
                owner(socket.owner);
                if let UnixName::Path { access, .. } = &socket.name {
                    owner((access.0, access.1));
                    assert_eq!(access.2 & SET_IDS, 0);
                }
                options(&socket.options);
            }
            Kind::Netlink(socket) => options(&socket.options),
            _ => {}
        }
    }
    for pipe in image.pipes.values() {
        assert!(pipe.capacity <= 1 << 20, "{}", pipe.capacity);
    }
    for terminal in image.terminals.values() {
        let (user, _, mode) = terminal.access;
        assert!(user == USER && mode & SET_IDS == 0);
    }
    for content in image.contents.values() {
        let (user, group, mode) = content.access;
        owner((user, group));
        assert_eq!(mode & SET_IDS, 0);
    }
}

/// Asserts limits of `SOL_SOCKET` options: no `SO_MARK`, no forced buffers, a priority of at most 6.
fn options(options: &[SocketOption]) {
    for option in options.iter().filter(|option| option.level == 1) {
        let value = option.value.0.first_chunk().copied().unwrap_or_default();
        let value = i32::from_ne_bytes(value);
        match option.name {
            36 | 32 | 33 => assert_eq!(value, 0, "{option:?}"),
            12 => assert!((0..=6).contains(&value), "{option:?}"),
            _ => {}
        }
    }
}

fn socket(socket: &SocketStatic) {
    match socket {
        SocketStatic::Unconnected(fixed) => {
            fixed.local.iter().for_each(port);
            stream(&fixed.options);
        }
        SocketStatic::Connection(fixed) => {
            port(&fixed.local);
            stream(&fixed.options);
        }
        SocketStatic::Closed(fixed) => stream(&fixed.options),
        SocketStatic::Datagrams(fixed) => port(&fixed.local),
        SocketStatic::Ended { .. } => {}
    }
}

fn port(local: &SocketAddr) {
    let port = local.port();
    assert!(port == 0 || port >= 1024 || port == PORT, "{local}");
}

fn stream(options: &SocketOptions) {
    assert!(["", "reno", "cubic"].contains(&&*options.congestion_control));
    assert!((0..=4 << 20).contains(&options.send_buffer));
    assert!((0..=6 << 20).contains(&options.receive_buffer));
}
