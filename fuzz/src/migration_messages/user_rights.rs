//! Rights of an ordinary user's process, stated independently of the judge: each function panics if an object exceeds
//! them.

use super::{GROUP, PORT, PROGRAMS, USER};
use holdfast_checkpoint::files::FilesImage;
use holdfast_checkpoint::files::image::{OpenFileKind, SocketOption, UnixName};
use holdfast_checkpoint::image::{
    Credentials, DescriptorUpdate, MappingBacking, MemoryMapping, OpenFilesUpdate, PageRun,
    ProcessTreeState, SharedMemoryKind, TreeLayout,
};
use holdfast_checkpoint::sockets::SocketStaticState;
use holdfast_tcp_repair::SocketOptions;
use std::net::SocketAddr;

/// Bytes that an ordinary process may lock, by `RLIMIT_MEMLOCK` of
/// [`NodeLimits::default`](holdfast_checkpoint::image_judge::NodeLimits).
const LOCKED_BYTES_MAX: u64 = 8 << 20;
/// `RLIMIT_NOFILE` of `NodeLimits::default`.
const FILES_MAX: u64 = 1 << 19;
/// Numbers of `RLIMIT_NOFILE`, `RLIMIT_MEMLOCK`, `RLIMIT_NICE` and `RLIMIT_RTPRIO`, and their hard limits in
/// `NodeLimits::default`.
const LIMITS: [(usize, u64); 4] = [(7, FILES_MAX), (8, LOCKED_BYTES_MAX), (13, 0), (14, 0)];
/// `VM_LOCKED` as represented in the image.
const LOCKED: u32 = holdfast_checkpoint::procfs::VmFlags::LOCKED;
/// `CLOCK_REALTIME_ALARM` and `CLOCK_BOOTTIME_ALARM`.
const ALARM_CLOCKS: [i32; 2] = [8, 9];
/// Set-user-ID and set-group-ID.
const SET_IDS: u32 = 0o6000;

fn assert_credentials(credentials: &Credentials) {
    assert_eq!(credentials.uids, [USER; 4]);
    assert_eq!(credentials.gids, [GROUP; 4]);
    assert!(
        credentials.groups.iter().all(|group| *group == GROUP),
        "{credentials:?}"
    );
    let [inheritable, permitted, effective, _, ambient] = credentials.capabilities;
    assert_eq!([inheritable, permitted, effective, ambient], [0; 4]);
    // SECBIT_KEEP_CAPS alone.
    assert!(
        [0, 16].contains(&credentials.secure_bits),
        "{credentials:?}"
    );
}

fn assert_owner(of: (u32, u32)) {
    assert_eq!(of, (USER, GROUP));
}

pub fn assert_tree(tree: &TreeLayout) {
    for process in tree.processes.iter().filter(|of| of.exit_status.is_none()) {
        assert_credentials(&process.credentials);
        let program = &tree.files[process.executable as usize].path;
        let program = String::from_utf8_lossy(program);
        // A list of programs may also name a program itself.
        let is_listed = program == PROGRAMS || program.starts_with(&format!("{PROGRAMS}/"));
        assert!(is_listed, "{program}");
        assert!(!program.split('/').any(|part| part == ".."), "{program}");
        let locked = process.mappings.iter().filter(|of| of.advice & LOCKED != 0);
        let locked: u128 = locked.map(|of| u128::from(of.end - of.start)).sum();
        assert!(
            locked <= LOCKED_BYTES_MAX.into(),
            "{locked} bytes are locked"
        );
    }
    for object in &tree.shared_memory {
        if let SharedMemoryKind::SystemV(segment) = &object.kind {
            assert_owner(segment.owner);
            assert_owner(segment.creator);
            assert!(
                !segment.is_locked || object.size <= LOCKED_BYTES_MAX,
                "{segment:?}"
            );
        }
    }
}

pub fn assert_frozen(frozen: &ProcessTreeState) {
    for process in frozen.processes.iter().flatten() {
        for thread in &process.threads {
            assert_credentials(&thread.credentials);
            assert!(thread.no_new_privileges || thread.seccomp_filters.is_empty());
            let scheduling = &thread.scheduling;
            // SCHED_OTHER, SCHED_BATCH, SCHED_IDLE, SCHED_EXT; or a real-time policy with priority 0, which the kernel
            // refuses.
            let is_normal_policy = [0, 3, 5, 7].contains(&scheduling.policy);
            let is_zero_priority = [1, 2].contains(&scheduling.policy) && scheduling.priority == 0;
            assert!(is_normal_policy || is_zero_priority, "{scheduling:?}");
            assert!(scheduling.nice >= 0, "{scheduling:?}");
            assert_ne!(thread.io_priority >> 13, 1, "real-time I/O");
        }
        assert!(process.oom_score_adjustment >= 0);
        assert_eq!(process.limits.len(), 16);
        for (resource, limit) in process.limits.iter().enumerate() {
            let limit_max = LIMITS.iter().find(|(number, _)| *number == resource);
            let most = limit_max.map_or(u64::MAX, |(_, most)| *most);
            assert!(
                limit.soft <= limit.hard && limit.hard <= most,
                "limit {resource}: {limit:?}"
            );
        }
        let timers = &process.posix_timers;
        assert!(
            timers
                .iter()
                .all(|timer| !ALARM_CLOCKS.contains(&timer.clock))
        );
    }
}

/// Asserts that memory is written only inside the process's own private mappings, for each page.
pub fn assert_memory(mappings: &[MemoryMapping], run: &PageRun) {
    let is_own = |mapping: &&MemoryMapping| match &mapping.backing {
        MappingBacking::Anonymous(_) => true,
        MappingBacking::File { shared, .. } => !shared,
        MappingBacking::Shared { .. } | MappingBacking::Kernel(_) => false,
    };
    let own_mappings: Vec<&MemoryMapping> = mappings.iter().filter(is_own).collect();
    let pages = run.length.div_ceil(4096).min(1 << 12);
    for page in 0..pages {
        let at = run.start + page * 4096;
        let is_mapped = own_mappings.iter().any(|of| of.start <= at && at < of.end);
        assert!(is_mapped, "{at:#x} is not the process's own memory");
    }
    let last = run.start.checked_add(run.length - 1).expect("no overflow");
    assert!(
        own_mappings
            .iter()
            .any(|of| of.start <= last && last < of.end)
    );
}

pub fn assert_descriptors(found: &DescriptorUpdate) {
    // Changes relative to nothing equal the image; changes relative to another image are judged alike.
    if let OpenFilesUpdate::Image(image) = &found.files {
        assert_files(image);
    }
    found.sockets.values().for_each(assert_socket);
}

fn assert_files(image: &FilesImage) {
    for table in image.tables.values() {
        let (soft, hard) = table.descriptors_max;
        assert!(soft <= hard && hard <= FILES_MAX);
    }
    for file in image.files.values() {
        // The restorer is process 1, and a process group would be a negative number; neither may be the owner.
        assert!(file.owner.is_none_or(|owner| owner.pid > 1), "{file:?}");
        match &file.kind {
            OpenFileKind::Timer(timer) => assert!(!ALARM_CLOCKS.contains(&timer.clock)),
            OpenFileKind::Epoll { watches } => {
                // EPOLLWAKEUP.
                assert!(watches.iter().all(|watch| watch.events & (1 << 29) == 0));
            }
            OpenFileKind::Unix(socket) => {
                assert_owner(socket.owner);
                if let UnixName::Path { access, .. } = &socket.name {
                    assert_owner((access.0, access.1));
                    assert_eq!(access.2 & SET_IDS, 0);
                }
                assert_options(&socket.options);
            }
            OpenFileKind::Netlink(socket) => assert_options(&socket.options),
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
        assert_owner((user, group));
        assert_eq!(mode & SET_IDS, 0);
    }
}

/// Asserts limits of `SOL_SOCKET` options: no `SO_MARK`, no forced buffers, a priority of at most 6.
fn assert_options(options: &[SocketOption]) {
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

fn assert_socket(socket: &SocketStaticState) {
    match socket {
        SocketStaticState::Unconnected(fixed) => {
            fixed.local.iter().for_each(assert_port);
            assert_tcp_options(&fixed.options);
        }
        SocketStaticState::Connection(fixed) => {
            assert_port(&fixed.local);
            assert_tcp_options(&fixed.options);
        }
        SocketStaticState::Closed(fixed) => assert_tcp_options(&fixed.options),
        SocketStaticState::Datagrams(fixed) => assert_port(&fixed.local),
        SocketStaticState::Ended { .. } => {}
    }
}

fn assert_port(local: &SocketAddr) {
    let port = local.port();
    assert!(port == 0 || port >= 1024 || port == PORT, "{local}");
}

fn assert_tcp_options(options: &SocketOptions) {
    assert!(["", "reno", "cubic"].contains(&&*options.congestion_control));
    assert!((0..=4 << 20).contains(&options.send_buffer));
    assert!((0..=6 << 20).contains(&options.receive_buffer));
}
