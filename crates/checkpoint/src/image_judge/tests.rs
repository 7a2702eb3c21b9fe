//! Tests of the state that an ordinary user's process may have, and of state that only root's may have.

use super::*;
use crate::files::FilesImage;
use crate::files::image::{
    ByteString, ContentForm, EpollWatch, NamelessContent, NetlinkSocket, OpenFile, OpenFileKind,
    Pipe, PseudoTerminal, SignalOwner, SocketOption, TimerFdState, UnixConnectionState, UnixName,
    UnixSocket,
};
use crate::image::{
    BackingFile, Credentials, DescriptorUpdate, MappingBacking, MemoryMapping, OpenFilesUpdate,
    PosixTimer, ProcessLayout, ProcessState, ProcessTreeState, ResourceLimit, SharedMemory,
    SharedMemoryKind, SystemVSegment, ThreadState, TreeLayout,
};
use crate::procfs::VmFlags;
use crate::sockets::SocketStaticState;
use holdfast_sys::socket_filter::SocketFilter;
use holdfast_tcp_repair::{SocketOptions, UnconnectedTcpSocket};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

const USER: u32 = 1000;
const GROUP: u32 = 100;

fn judge(users: &[u32]) -> ImageJudge {
    let allowed = ImagePolicy {
        users: users.iter().copied().collect(),
        groups: [GROUP].into(),
        programs: vec!["/usr/games".into()],
        ports: [443].into(),
    };
    ImageJudge::new(allowed, NodeLimits::default())
}

/// Expected reason of a refusal, and a change that makes a valid image invalid.
type InvalidChange<'a, T> = (&'a str, &'a dyn Fn(&mut T));

/// Checks that an ordinary user may have the valid image, and that only root may have each of the changed ones.
#[track_caller]
fn assert_only_root_may<T>(
    good: impl Fn() -> T,
    verdict: impl Fn(&ImageJudge, &T) -> Verdict,
    changes: &[InvalidChange<'_, T>],
) {
    let (ordinary, root) = (judge(&[USER]), judge(&[0, USER]));
    assert_eq!(verdict(&ordinary, &good()), Ok(()));
    for (why, change) in changes {
        let mut image = good();
        change(&mut image);
        let found = verdict(&ordinary, &image).expect_err(why);
        assert!(found.contains(why), "{why}: {found}");
        assert_eq!(verdict(&root, &image), Ok(()), "{why}");
    }
}

fn valid_state() -> ProcessTreeState {
    let mut thread = ThreadState::default();
    thread.credentials.uids = [USER; 4];
    thread.credentials.gids = [GROUP; 4];
    thread.credentials.capabilities[3] = u64::MAX;
    thread.no_new_privileges = true;
    thread.seccomp_filters = vec![serde_bytes::ByteBuf::from(vec![0; 8])];
    thread.io_priority = 2 << 13;
    let process = ProcessState {
        threads: vec![thread],
        limits: vec![ResourceLimit { soft: 0, hard: 0 }; 16],
        ..ProcessState::default()
    };
    ProcessTreeState {
        processes: vec![Some(process), None],
    }
}

fn process_of(frozen: &mut ProcessTreeState) -> &mut ProcessState {
    frozen.processes[0].as_mut().expect("no zombie")
}

fn thread_of(frozen: &mut ProcessTreeState) -> &mut ThreadState {
    &mut process_of(frozen).threads[0]
}

#[test]
fn state_reserved_to_root_is_refused() {
    assert_only_root_may(
        valid_state,
        |judge, frozen| judge.check_state(frozen),
        &[
            ("seccomp filters without no_new_privs", &|it| {
                thread_of(it).no_new_privileges = false
            }),
            ("it has capabilities", &|it| {
                thread_of(it).credentials.capabilities[1] = 1 << 12
            }),
            ("it has capabilities", &|it| {
                thread_of(it).credentials.capabilities[2] = 1
            }),
            ("it has capabilities", &|it| {
                thread_of(it).credentials.capabilities[4] = 1
            }),
            ("inheritable capabilities", &|it| {
                thread_of(it).credentials.capabilities[0] = 1
            }),
            ("securebits 0x5", &|it| {
                thread_of(it).credentials.secure_bits = 5
            }),
            ("real-time priority 99", &|it| {
                (
                    thread_of(it).scheduling.policy,
                    thread_of(it).scheduling.priority,
                ) = (1, 99);
            }),
            ("scheduling policy 6", &|it| {
                thread_of(it).scheduling.policy = 6
            }),
            ("nice value -1", &|it| thread_of(it).scheduling.nice = -1),
            ("real-time class of I/O priority", &|it| {
                thread_of(it).io_priority = 1 << 13
            }),
            ("oom_score_adj is -1", &|it| {
                process_of(it).oom_score_adjustment = -1
            }),
            ("RLIMIT_MEMLOCK", &|it| {
                process_of(it).limits[8].hard = u64::MAX
            }),
            ("RLIMIT_RTPRIO", &|it| process_of(it).limits[14].hard = 1),
            ("RLIMIT_CPU", &|it| process_of(it).limits[0].soft = 1),
            ("15 limits", &|it| process_of(it).limits.truncate(15)),
            ("wakes the machine", &|it| {
                process_of(it).posix_timers.push(PosixTimer {
                    clock: 8,
                    ..PosixTimer::default()
                });
            }),
        ],
    );
    // The policy of users and groups applies to every ordinary user; processes of root may have any group.
    for (user, group, why) in [
        (42, GROUP, "user 42"),
        (0, GROUP, "user 0"),
        (USER, 42, "group 42"),
    ] {
        let mut other = valid_state();
        thread_of(&mut other).credentials.uids[2] = user;
        thread_of(&mut other).credentials.groups = vec![GROUP, group];
        let found = judge(&[USER]).check_state(&other).expect_err(why);
        assert!(found.contains(why), "{found}");
    }
}

#[test]
fn higher_node_limits_allow_more() {
    let here = NodeLimits {
        limits: [u64::MAX; 16],
        oom_score_adjustment: 100,
        ..NodeLimits::default()
    };
    let judge = ImageJudge::new(judge(&[USER]).policy, here);
    let mut it = valid_state();
    assert!(
        judge
            .check_state(&it)
            .is_err_and(|why| why.contains("oom_score_adj"))
    );
    process_of(&mut it).oom_score_adjustment = 100;
    (
        thread_of(&mut it).scheduling.policy,
        thread_of(&mut it).scheduling.priority,
    ) = (2, 99);
    thread_of(&mut it).scheduling.nice = -20;
    process_of(&mut it).limits[14].hard = 99;
    assert_eq!(judge.check_state(&it), Ok(()));
}

fn valid_tree() -> TreeLayout {
    let mapping = MemoryMapping {
        start: 0x1000,
        end: 0x3000,
        protection: 3,
        advice: VmFlags::LOCKED,
        backing: MappingBacking::Anonymous(Vec::new()),
    };
    let segment = SystemVSegment {
        id: 1,
        key: 0,
        size: 4096,
        mode: 0o600,
        is_marked_removed: false,
        is_locked: true,
        is_gone: false,
        owner: (USER, GROUP),
        creator: (USER, GROUP),
    };
    let credentials = Credentials {
        uids: [USER; 4],
        gids: [GROUP; 4],
        ..Credentials::default()
    };
    TreeLayout {
        processes: vec![ProcessLayout {
            mappings: vec![mapping],
            credentials,
            ..ProcessLayout::default()
        }],
        files: vec![BackingFile {
            path: b"/usr/games/server".to_vec(),
            ..BackingFile::default()
        }],
        shared_memory: vec![SharedMemory {
            kind: SharedMemoryKind::SystemV(segment),
            size: 4096,
            identity: (0, 0, 0),
        }],
        ..TreeLayout::default()
    }
}

fn segment_of(tree: &mut TreeLayout) -> &mut SystemVSegment {
    match &mut tree.shared_memory[0].kind {
        SharedMemoryKind::SystemV(segment) => segment,
        _ => unreachable!("made so"),
    }
}

#[test]
fn trees_reserved_to_root_are_refused() {
    assert_only_root_may(
        valid_tree,
        |judge, tree| judge.check_tree(tree),
        &[
            ("it has capabilities", &|it| {
                it.processes[0].credentials.capabilities[1] = 1;
            }),
            ("memory locked", &|it| {
                it.processes[0].mappings[0].end = 0x1000_0000
            }),
            ("System V memory 1: user 0", &|it| {
                segment_of(it).owner.0 = 0
            }),
            ("System V memory 1: group 0", &|it| {
                segment_of(it).creator.1 = 0
            }),
            ("System V memory 1 is locked", &|it| {
                it.shared_memory[0].size = 1 << 30
            }),
            ("shared memory /dev/shm/x: user 0", &|it| {
                let path = b"/dev/shm/x".to_vec();
                let access = (0, GROUP, 0o600);
                it.shared_memory[0].kind = SharedMemoryKind::Posix { path, access };
            }),
            ("deleted file /x has mode 4755", &|it| {
                let form = ContentForm::Deleted { path: "/x".into() };
                let access = (USER, GROUP, 0o4755);
                it.shared_memory[0].kind = SharedMemoryKind::Deleted { form, access };
            }),
        ],
    );
    for path in ["/bin/sh", "/usr/games/../bin/sh"] {
        let mut other = valid_tree();
        other.files[0].path = path.into();
        for users in [&[USER][..], &[0, USER]] {
            assert!(
                judge(users)
                    .check_tree(&other)
                    .is_err_and(|why| why.contains(path))
            );
        }
    }
}

fn image_with(kind: OpenFileKind) -> FilesImage {
    let mut image = FilesImage::default();
    let file = OpenFile {
        flags: 0,
        owner: None,
        locks: Vec::new(),
        kind,
    };
    image.files.insert(1, file);
    image
}

fn unix_socket(owner: (u32, u32)) -> UnixSocket {
    UnixSocket {
        socket: 1,
        name: UnixName::None,
        link: UnixConnectionState::Unconnected,
        owner,
        peer: None,
        shutdown: 0,
        options: Vec::new(),
        filter: SocketFilter::default(),
        queue: Vec::new(),
    }
}

fn int_option(level: i32, name: i32, value: i32) -> SocketOption {
    SocketOption {
        level,
        name,
        value: ByteString(value.to_ne_bytes().to_vec()),
    }
}

/// Returns a pipe as a process that was root has made it.
fn empty_pipe(capacity: u32) -> Pipe {
    Pipe {
        path: None,
        capacity,
        chunks: Vec::new(),
        packet_mode: false,
        access: (0, 0, 0o600),
    }
}

#[test]
fn descriptors_reserved_to_root_are_refused() {
    let timer = |clock| TimerFdState {
        clock,
        set_flags: 0,
        value_ns: 0,
        interval_ns: 0,
        ticks: 0,
    };
    let watch = |events| EpollWatch {
        fd: 0,
        file: 1,
        events,
        data: 0,
    };
    let content = |access| {
        let mut image = image_with(OpenFileKind::Content {
            content: 2,
            offset: 0,
        });
        let content = NamelessContent {
            form: ContentForm::Memory {
                name: "m".into(),
                seals: 0,
            },
            access,
            times_ns: (0, 0),
            size: 0,
            mapped_memory: None,
            chunks: BTreeMap::new(),
        };
        image.contents.insert(2, content);
        image
    };
    let pipe = |capacity| {
        let mut image = image_with(OpenFileKind::Pipe { pipe: 2 });
        image.pipes.insert(2, empty_pipe(capacity));
        image
    };
    let terminal = |access| {
        let mut image = image_with(OpenFileKind::TerminalMaster { terminal: 2 });
        let terminal = PseudoTerminal {
            modes: ByteString::default(),
            window: [0; 4],
            locked: false,
            packet_mode: false,
            exclusive: false,
            session: None,
            access,
        };
        image.terminals.insert(2, terminal);
        image
    };
    let unix_with = |change: &dyn Fn(&mut UnixSocket)| {
        let mut socket = unix_socket((USER, GROUP));
        change(&mut socket);
        image_with(OpenFileKind::Unix(Box::new(socket)))
    };
    let owned_by = |pid| {
        let mut image = image_with(OpenFileKind::Event {
            count: 0,
            semaphore: false,
        });
        let file = image.files.get_mut(&1).expect("there");
        file.owner = Some(SignalOwner {
            kind: 1,
            pid,
            signal: 0,
        });
        image
    };
    let table_with_limit = |hard| {
        let mut image = FilesImage::default();
        image.tables.entry(0).or_default().descriptors_max = (0, hard);
        image
    };
    let netlink = |options| {
        image_with(OpenFileKind::Netlink(NetlinkSocket {
            socket: 3,
            port: 0,
            groups: Vec::new(),
            options,
            filter: SocketFilter::default(),
        }))
    };
    let accepted = [
        image_with(OpenFileKind::Timer(timer(libc::CLOCK_MONOTONIC))),
        image_with(OpenFileKind::Epoll {
            watches: vec![watch(1)],
        }),
        content((USER, GROUP, 0o755)),
        pipe(1 << 16),
        terminal((USER, 5, 0o620)),
        unix_with(&|_| ()),
        unix_with(&|socket| socket.options.push(int_option(1, libc::SO_PRIORITY, 6))),
        owned_by(7),
        table_with_limit(1024),
        netlink(Vec::new()),
    ];
    let refused = [
        (
            "wakes the machine",
            image_with(OpenFileKind::Timer(timer(9))),
        ),
        (
            "EPOLLWAKEUP",
            image_with(OpenFileKind::Epoll {
                watches: vec![watch(1 << 29)],
            }),
        ),
        ("user 0", content((0, GROUP, 0o755))),
        ("group 0", content((USER, 0, 0o755))),
        ("mode 4755", content((USER, GROUP, 0o4755))),
        ("a pipe has a capacity", pipe(1 << 24)),
        ("a terminal: user 0", terminal((0, 5, 0o620))),
        (
            "creator of a Unix socket: user 0",
            unix_with(&|socket| socket.owner = (0, GROUP)),
        ),
        (
            "level 1",
            unix_with(&|socket| socket.options.push(int_option(1, libc::SO_PRIORITY, 7))),
        ),
        (
            "level 1",
            unix_with(&|socket| socket.options.push(int_option(1, libc::SO_MARK, 1))),
        ),
        (
            "level 1",
            unix_with(&|socket| socket.options.push(int_option(1, libc::SO_SNDBUF, 1 << 30))),
        ),
        (
            "group 0",
            unix_with(&|socket| {
                socket.name = UnixName::Path {
                    name: "/run/x".to_owned(),
                    file: None,
                    access: (USER, 0, 0o600),
                };
            }),
        ),
        ("process 1 receives", owned_by(1)),
        ("RLIMIT_NOFILE", table_with_limit(u64::MAX)),
        ("level 41", netlink(vec![int_option(41, 75, 1)])),
    ];
    let descriptors = |files| DescriptorUpdate {
        files,
        sockets: BTreeMap::new(),
        removed: BTreeSet::new(),
    };
    // Changes are judged in the same way as a first image.
    let image_and_changes = |image: FilesImage| {
        let changes = image.changes_since(&FilesImage::default());
        [
            OpenFilesUpdate::Changes(changes),
            OpenFilesUpdate::Image(image),
        ]
        .map(descriptors)
    };
    for found in accepted.into_iter().flat_map(image_and_changes) {
        assert_eq!(
            judge(&[USER]).check_descriptors(&found),
            Ok(()),
            "{found:?}"
        );
    }
    for (why, image) in refused {
        for found in image_and_changes(image) {
            let verdict = judge(&[USER]).check_descriptors(&found).expect_err(why);
            assert!(verdict.contains(why), "{why}: {verdict}");
            assert_eq!(judge(&[0]).check_descriptors(&found), Ok(()));
        }
    }
}

#[test]
fn sockets_reserved_to_root_are_refused() {
    let options = || SocketOptions {
        congestion_control: "cubic".to_owned(),
        send_buffer: 1 << 20,
        receive_buffer: 1 << 20,
        ..SocketOptions::default()
    };
    let socket = |port: u16, options: SocketOptions| {
        let fixed = UnconnectedTcpSocket {
            v6_socket: false,
            local: Some(SocketAddr::from(([0; 4], port))),
            listen: None,
            options,
        };
        DescriptorUpdate {
            files: OpenFilesUpdate::Image(FilesImage::default()),
            sockets: [(1, SocketStaticState::Unconnected(Box::new(fixed)))].into(),
            removed: BTreeSet::new(),
        }
    };
    let socket_with = |change: &dyn Fn(&mut SocketOptions)| {
        let mut options = options();
        change(&mut options);
        socket(8080, options)
    };
    // Options are given by their numbers in the image: SO_KEEPALIVE, then IP_TRANSPARENT, SO_PRIORITY, SO_MARK.
    let socket_with_option = |id, value| socket_with(&|options| options.ints = vec![(id, value)]);
    for accepted in [
        socket(8080, options()),
        socket(1024, options()),
        socket(443, options()),
        socket_with_option(17, 1),
        socket_with_option(5, 0),
    ] {
        assert_eq!(
            judge(&[USER]).check_descriptors(&accepted),
            Ok(()),
            "{accepted:?}"
        );
    }
    for (why, refused) in [
        ("ports below 1024", socket(22, options())),
        ("ports below 1024", socket(1023, options())),
        ("option 19 of level 0", socket_with_option(1, 1)),
        ("7 as option 12", socket_with_option(4, 7)),
        ("option 36 of level 1", socket_with_option(5, 1)),
        (
            "a buffer of",
            socket_with(&|options| options.send_buffer = 1 << 30),
        ),
        (
            "a buffer of",
            socket_with(&|options| options.receive_buffer = -1),
        ),
        (
            "congestion control bbr",
            socket_with(&|options| options.congestion_control = "bbr".to_owned()),
        ),
    ] {
        let verdict = judge(&[USER]).check_descriptors(&refused).expect_err(why);
        assert!(verdict.contains(why), "{why}: {verdict}");
        assert_eq!(judge(&[0]).check_descriptors(&refused), Ok(()));
    }
}

#[test]
fn control_groups_with_reserved_resources_are_refused() {
    let group = |file: &str, value: &str| {
        let text =
            postcard::to_stdvec(&("system.slice/game.service", BTreeMap::from([(file, value)])));
        postcard::from_bytes::<ControlGroup>(&text.expect("encodes")).expect("a group")
    };
    for (file, value) in [
        ("memory.max", "1000"),
        ("cpu.weight", "50"),
        ("io.weight", "default 10"),
        ("pids.max", "7"),
    ] {
        assert_eq!(
            judge(&[USER]).check_control_group(&group(file, value)),
            Ok(())
        );
    }
    for (file, value) in [
        ("memory.min", "1000"),
        ("memory.low", "max"),
        ("cpuset.cpus", "0"),
        ("cpuset.cpus.partition", "root"),
        ("cpu.uclamp.min", "50.00"),
        ("cpu.weight", "10000"),
        ("io.weight", "default 1000"),
    ] {
        let verdict = judge(&[USER])
            .check_control_group(&group(file, value))
            .expect_err(file);
        assert!(verdict.contains(file), "{verdict}");
        assert_eq!(judge(&[0]).check_control_group(&group(file, value)), Ok(()));
    }
}
