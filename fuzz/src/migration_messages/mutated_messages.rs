//! Sound messages of an ordinary user's process, and changes to them, each of a field to a value.

use super::{GROUP, PROGRAMS, USER, encode_message, encode_pages};
use holdfast_checkpoint::files::FilesImage;
use holdfast_checkpoint::files::image::{
    ByteString, ContentForm, EpollWatch, NamelessContent, NetlinkSocket, OpenFile, OpenFileKind,
    Pipe, PseudoTerminal, SignalOwner, SocketOption, TimerFdState, UnixConnectionState, UnixName,
    UnixSocket,
};
use holdfast_checkpoint::image::{
    BackingFile, Credentials, DescriptorUpdate, MappingBacking, MemoryMapping, MemorySpace,
    MissingPages, OpenFilesUpdate, PageContent as RunContent, PageRun, PagesMessage, PosixTimer,
    ProcessLayout, ProcessState, ProcessTreeState, ResourceLimit, SharedMemory, SharedMemoryKind,
    SignalAction, SystemVSegment, ThreadState, TreeLayout,
};
use holdfast_checkpoint::procfs::VmFlags;
use holdfast_checkpoint::sockets::SocketStaticState;
use holdfast_sys::socket_filter::SocketFilter;
use holdfast_tcp_repair::{SocketOptions, UnconnectedTcpSocket};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

/// Values for changed fields: numbers at the edges of an ordinary user's rights.
const VALUES: [u64; 32] = [
    0,
    1,
    2,
    3,
    5,
    6,
    7,
    8,
    9,
    16,
    20,
    22,
    36,
    100,
    443,
    1000,
    1023,
    1024,
    0o4755,
    8192,
    (8 << 20) - 4096,
    8 << 20,
    (8 << 20) + 4096,
    1 << 19,
    (1 << 19) + 1,
    1 << 20,
    (1 << 20) + 1,
    1 << 29,
    1 << 30,
    0x7fff_ffff,
    0xffff_ffff,
    u64::MAX,
];
const PATHS: [&str; 5] = [
    "/usr/games/server",
    "/bin/sh",
    "/usr/games/../../bin/sh",
    "/usr/gamesx/server",
    "/usr/games",
];

/// Changes to a message.
pub trait FieldChanges: Iterator<Item = (u8, u8)> {}
impl<T: Iterator<Item = (u8, u8)>> FieldChanges for T {}

fn edge_value(of: u8) -> u64 {
    VALUES[usize::from(of) % VALUES.len()]
}

fn credentials() -> Credentials {
    Credentials {
        uids: [USER; 4],
        gids: [GROUP; 4],
        groups: vec![GROUP],
        ..Credentials::default()
    }
}

/// Changes a process's credentials; `field` is a number below 16.
fn change_credentials(of: &mut Credentials, field: u8, value: u64) {
    let field = usize::from(field);
    match field {
        0..4 => of.uids[field] = value as u32,
        4..8 => of.gids[field - 4] = value as u32,
        8 => of.groups.push(value as u32),
        9..14 => of.capabilities[field - 9] = value,
        _ => of.secure_bits = value as u32,
    }
}

/// Returns a tree: a process with memory of all kinds, a zombie, and a System V segment.
pub fn tree_message(changes: impl FieldChanges) -> Vec<u8> {
    let mut tree = sound_tree();
    for (field, of) in changes {
        let number = edge_value(of);
        let process = &mut tree.processes[0];
        let mapping = &mut process.mappings[usize::from(of) % 4];
        match field % 32 {
            field @ 0..16 => change_credentials(&mut process.credentials, field, number),
            16 => tree.files[0].path = PATHS[usize::from(of) % PATHS.len()].into(),
            17 => mapping.end = mapping.start.saturating_add(number),
            18 => mapping.advice |= VmFlags::LOCKED,
            19 => mapping.start = number << 12,
            20 => segment(&mut tree).owner.0 = number as u32,
            21 => segment(&mut tree).owner.1 = number as u32,
            22 => segment(&mut tree).creator.0 = number as u32,
            23 => segment(&mut tree).is_locked = of % 2 == 1,
            24 => {
                segment(&mut tree).size = number;
                tree.shared_memory[0].size = number;
            }
            25 => process.no_new_privileges = of % 2 == 1,
            26 => process.exit_status = (of % 2 == 1).then_some(0),
            27 => process.executable = number as u32,
            28 => mapping.backing = MappingBacking::Anonymous(Vec::new()),
            29 => mapping.backing = MappingBacking::Kernel("[vdso]".to_owned()),
            30 => {
                mapping.backing = MappingBacking::File {
                    file: 0,
                    offset: 0,
                    shared: of % 2 == 1,
                };
            }
            _ => process.pid = number as i32,
        }
    }
    encode_message(&tree)
}

fn segment(tree: &mut TreeLayout) -> &mut SystemVSegment {
    match &mut tree.shared_memory[0].kind {
        SharedMemoryKind::SystemV(segment) => segment,
        _ => unreachable!("made so"),
    }
}

fn sound_tree() -> TreeLayout {
    let mapping = |(start, end), backing| MemoryMapping {
        start,
        end,
        protection: 3,
        advice: 0,
        backing,
    };
    let object = MappingBacking::Shared {
        object: 0,
        offset: 0,
    };
    let mappings = vec![
        mapping((0x1000, 0x3000), MappingBacking::Anonymous(Vec::new())),
        mapping((0x5000, 0x6000), object),
        mapping(
            (0x7000, 0x8000),
            MappingBacking::Kernel("[vdso]".to_owned()),
        ),
        mapping((0x9000, 0xa000), MappingBacking::Anonymous(Vec::new())),
    ];
    let process = ProcessLayout {
        pid: 100,
        group: 100,
        session: 100,
        exit_signal: 17,
        threads: vec![100],
        mappings,
        credentials: credentials(),
        directory: b"/".to_vec(),
        ..ProcessLayout::default()
    };
    let zombie = ProcessLayout {
        pid: 102,
        parent: Some(0),
        group: 100,
        session: 100,
        exit_status: Some(256),
        ..ProcessLayout::default()
    };
    let segment = SystemVSegment {
        id: 1,
        key: 0,
        size: 4096,
        mode: 0o600,
        is_marked_removed: false,
        is_locked: false,
        is_gone: false,
        owner: (USER, GROUP),
        creator: (USER, GROUP),
    };
    TreeLayout {
        processes: vec![process, zombie],
        files: vec![BackingFile {
            path: format!("{PROGRAMS}/server").into(),
            build_id: vec![1; 20],
            ..BackingFile::default()
        }],
        shared_memory: vec![SharedMemory {
            kind: SharedMemoryKind::SystemV(segment),
            size: 4096,
            identity: (0, 1, 1),
        }],
        ..TreeLayout::default()
    }
}

/// Returns the frozen state of the process in [`tree_message`].
pub fn frozen_message(changes: impl FieldChanges) -> Vec<u8> {
    let thread = ThreadState {
        credentials: credentials(),
        ..ThreadState::default()
    };
    let mut process = ProcessState {
        threads: vec![thread.clone(), thread],
        signal_actions: vec![SignalAction::default(); 64],
        limits: vec![ResourceLimit::default(); 16],
        directory: b"/".to_vec(),
        ..ProcessState::default()
    };
    for (field, of) in changes {
        let number = edge_value(of);
        let thread = &mut process.threads[usize::from(of) % 2];
        match field % 32 {
            field @ 0..16 => change_credentials(&mut thread.credentials, field, number),
            16 => thread.scheduling.policy = number as u32,
            17 => thread.scheduling.priority = number as u32,
            18 => thread.scheduling.nice = number as i32,
            19 => thread.io_priority = number as u32,
            20 => thread.no_new_privileges = of % 2 == 1,
            21 => thread.seccomp_filters.push(vec![0; 8].into()),
            22 => process.oom_score_adjustment = number as i32,
            23 => process.posix_timers.push(PosixTimer {
                clock: number as i32,
                ..PosixTimer::default()
            }),
            24 => process.limits.truncate(number as usize),
            25 => process.threads.truncate(1 + usize::from(of) % 2),
            26 => process.directory = PATHS[usize::from(of) % PATHS.len()].into(),
            field => {
                let count = process.limits.len().max(1);
                if let Some(limit) = process.limits.get_mut(usize::from(of / 2) % count) {
                    let number = edge_value(of.rotate_left(u32::from(field)));
                    (limit.soft, limit.hard) = (number * u64::from(field % 2), number);
                }
            }
        }
        if process.threads.len() < 2 {
            process.threads.push(process.threads[0].clone());
        }
    }
    encode_message(&ProcessTreeState {
        processes: vec![Some(process), None],
    })
}

/// Returns runs of memory, the first in the first mapping.
pub fn pages_message(changes: impl FieldChanges) -> Vec<u8> {
    let mut run = PageRun {
        space: MemorySpace::Process(0),
        start: 0x1000,
        length: 0x1000,
        content: RunContent::Bytes,
    };
    for (field, of) in changes {
        match field % 4 {
            0 => run.start = u64::from(of % 16) << 12,
            1 => run.length = u64::from(of % 16) << 12,
            2 => run.start = edge_value(of) << 12,
            _ => {
                run.space = match of % 4 {
                    0 => MemorySpace::Shared(0),
                    of => MemorySpace::Process(u32::from(of) - 1),
                }
            }
        }
    }
    let bytes = vec![7; run.length as usize];
    let runs = vec![run];
    encode_pages(PagesMessage { runs, bytes })
}

/// Returns missing pages of the process, to be sent by post-copy.
pub fn missing_message() -> Vec<u8> {
    encode_message(&MissingPages::from_runs(&[PageRun {
        space: MemorySpace::Process(0),
        start: 0x9000,
        length: 0x1000,
        content: RunContent::Bytes,
    }]))
}

/// Returns descriptors of the process: one of each kind that is judged.
pub fn descriptors_message(changes: impl FieldChanges) -> Vec<u8> {
    let mut image = sound_image();
    let mut socket = sound_socket();
    for (field, of) in changes {
        let number = edge_value(of);
        match field % 24 {
            0 => image.tables.entry(0).or_default().descriptors_max = (0, number),
            1 => {
                if let Some(OpenFileKind::Timer(timer)) = kind(&mut image, 1) {
                    timer.clock = number as i32;
                }
            }
            2 => {
                if let Some(OpenFileKind::Epoll { watches }) = kind(&mut image, 2) {
                    watches[0].events = number as u32;
                }
            }
            3 => pipe(&mut image).capacity = number as u32,
            4 => terminal(&mut image).access.0 = number as u32,
            5 => terminal(&mut image).access.2 = number as u32,
            6 => content(&mut image).access.0 = number as u32,
            7 => content(&mut image).access.1 = number as u32,
            8 => content(&mut image).access.2 = number as u32,
            field @ 9..14 => {
                if let Some(OpenFileKind::Unix(unix)) = kind(&mut image, 6) {
                    change_unix(unix, field - 9, number);
                }
            }
            14 => {
                if let Some(OpenFileKind::Netlink(netlink)) = kind(&mut image, 7) {
                    netlink.options.push(socket_option(of, number));
                }
            }
            15 => {
                let owner = SignalOwner {
                    kind: 1,
                    pid: number as i32,
                    signal: 0,
                };
                image
                    .files
                    .values_mut()
                    .for_each(|file| file.owner = Some(owner));
            }
            16 => socket.local = Some(SocketAddr::from(([10, 0, 0, 1], number as u16))),
            17 => socket.options.send_buffer = number as i32,
            18 => socket.options.receive_buffer = number as i32,
            19 => {
                let names = ["", "reno", "cubic", "bbr", "dctcp"];
                socket.options.congestion_control = names[usize::from(of) % 5].to_owned();
            }
            _ => socket.options.device = "lo".to_owned(),
        }
    }
    encode_message(&DescriptorUpdate {
        files: OpenFilesUpdate::Image(image),
        sockets: [(9, SocketStaticState::Unconnected(Box::new(socket)))].into(),
        removed: BTreeSet::new(),
    })
}

fn socket_option(of: u8, number: u64) -> SocketOption {
    let names = [36, 12, 32, 33, 7, 8];
    SocketOption {
        level: 1,
        name: names[usize::from(of) % names.len()],
        value: ByteString((number as i32).to_ne_bytes().to_vec()),
    }
}

fn change_unix(unix: &mut UnixSocket, field: u8, number: u64) {
    let path = |access| UnixName::Path {
        name: "/run/x".to_owned(),
        file: None,
        access,
    };
    match field {
        0 => unix.owner.0 = number as u32,
        1 => unix.owner.1 = number as u32,
        2 => unix.name = path((number as u32, GROUP, 0o600)),
        3 => unix.name = path((USER, GROUP, number as u32)),
        _ => unix.options.push(socket_option(number as u8, number)),
    }
}

fn kind(image: &mut FilesImage, file: u32) -> Option<&mut OpenFileKind> {
    Some(&mut image.files.get_mut(&file)?.kind)
}

fn pipe(image: &mut FilesImage) -> &mut Pipe {
    image.pipes.get_mut(&101).expect("made so")
}

fn terminal(image: &mut FilesImage) -> &mut PseudoTerminal {
    image.terminals.get_mut(&102).expect("made so")
}

fn content(image: &mut FilesImage) -> &mut NamelessContent {
    image.contents.get_mut(&103).expect("made so")
}

fn sound_socket() -> UnconnectedTcpSocket {
    let mut options = SocketOptions::default();
    options.congestion_control = "cubic".to_owned();
    (options.send_buffer, options.receive_buffer) = (1 << 20, 1 << 20);
    UnconnectedTcpSocket {
        v6_socket: false,
        local: Some(SocketAddr::from(([10, 0, 0, 1], 8080))),
        listen: None,
        options,
    }
}

fn sound_image() -> FilesImage {
    let unix = UnixSocket {
        socket: 1,
        name: UnixName::None,
        link: UnixConnectionState::Unconnected,
        owner: (USER, GROUP),
        peer: None,
        shutdown: 0,
        options: Vec::new(),
        filter: SocketFilter::default(),
        queue: Vec::new(),
    };
    let netlink = NetlinkSocket {
        socket: 3,
        port: 0,
        groups: Vec::new(),
        options: Vec::new(),
        filter: SocketFilter::default(),
    };
    let kinds = [
        OpenFileKind::Timer(TimerFdState {
            clock: 1,
            set_flags: 0,
            value_ns: 0,
            interval_ns: 0,
            ticks: 0,
        }),
        OpenFileKind::Epoll {
            watches: vec![EpollWatch {
                fd: 1,
                file: 1,
                events: 1,
                data: 0,
            }],
        },
        OpenFileKind::Pipe { pipe: 101 },
        OpenFileKind::TerminalMaster { terminal: 102 },
        OpenFileKind::Content {
            content: 103,
            offset: 0,
        },
        OpenFileKind::Unix(Box::new(unix)),
        OpenFileKind::Netlink(netlink),
    ];
    let open = |kind| OpenFile {
        flags: 2,
        owner: None,
        locks: Vec::new(),
        kind,
    };
    let mut image = FilesImage {
        files: (1..).zip(kinds.map(open)).collect(),
        ..FilesImage::default()
    };
    image.pipes.insert(
        101,
        Pipe {
            path: None,
            capacity: 4096,
            chunks: Vec::new(),
            packet_mode: false,
            access: (USER, GROUP, 0o600),
        },
    );
    image.terminals.insert(
        102,
        PseudoTerminal {
            modes: ByteString::default(),
            window: [0; 4],
            locked: false,
            packet_mode: false,
            exclusive: false,
            session: None,
            access: (USER, 5, 0o620),
        },
    );
    image.contents.insert(
        103,
        NamelessContent {
            form: ContentForm::Memory {
                name: "m".into(),
                seals: 0,
            },
            access: (USER, GROUP, 0o600),
            times_ns: (0, 0),
            size: 0,
            mapped_memory: None,
            chunks: BTreeMap::new(),
        },
    );
    image
}
