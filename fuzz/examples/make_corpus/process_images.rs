//! Corpus of process images.

use crate::write_input;
use holdfast_checkpoint::files::FilesImage;
use holdfast_checkpoint::files::image::{
    ByteString, ContentForm, DescriptorSlot, DescriptorTable, EpollWatch, FileLock, LockHolder,
    NamelessContent, OpenFile, OpenFileKind, Pipe, SignalOwner, UnixConnectionState, UnixMessage,
    UnixName, UnixSocket,
};
use holdfast_checkpoint::image::{
    BackingFile, DescriptorUpdate, MappingBacking, MemoryMapping, MemorySpace, MissingPages,
    OpenFilesUpdate, PageContent, PageRun, PagesMessage, PosixTimer, ProcessLayout, ProcessState,
    ProcessTreeState, Rseq, SharedMemory, SharedMemoryKind, SignalAction, SignalInfo,
    SystemVSegment, ThreadState, TreeLayout, encode,
};
use std::collections::{BTreeMap, BTreeSet};

/// Writes one image of each kind, and the changes from an empty one.
pub fn write_images() -> std::io::Result<()> {
    let files = files();
    let changes = files.changes_since(&FilesImage::default());
    let all = [
        ("tree", 0, encode(&tree()).expect("sound")),
        ("frozen", 1, encode(&frozen()).expect("sound")),
        (
            "descriptors",
            2,
            encode(&descriptors(OpenFilesUpdate::Image(files))).expect("sound"),
        ),
        (
            "changes",
            2,
            encode(&descriptors(OpenFilesUpdate::Changes(changes))).expect("sound"),
        ),
        (
            "missing",
            3,
            encode(&MissingPages::from_runs(&runs())).expect("sound"),
        ),
        ("pages", 4, pages()),
    ];
    for (name, choice, bytes) in all {
        write_input("image", name, &[&[choice], &bytes[..]].concat())?;
    }
    Ok(())
}

fn tree() -> TreeLayout {
    let first = ProcessLayout {
        pid: 100,
        group: 100,
        session: 1,
        exit_signal: 17,
        threads: vec![100, 101],
        mappings: mappings(),
        ..ProcessLayout::default()
    };
    let zombie = ProcessLayout {
        pid: 102,
        parent: Some(0),
        group: 100,
        session: 1,
        exit_status: Some(256),
        ..ProcessLayout::default()
    };
    TreeLayout {
        boot_id: "b".to_owned(),
        vdso: vec![0x7f; 64],
        processes: vec![first, zombie],
        files: vec![BackingFile {
            path: b"/bin/true".to_vec(),
            size: 0x4000,
            build_id: vec![1; 20],
            ..BackingFile::default()
        }],
        shared_memory: shared_memory(),
        ..TreeLayout::default()
    }
}

fn mappings() -> Vec<MemoryMapping> {
    let backings = [
        MappingBacking::Anonymous(b"heap".to_vec()),
        MappingBacking::File {
            file: 0,
            offset: 0x1000,
            shared: false,
        },
        MappingBacking::Shared {
            object: 0,
            offset: 0,
        },
        MappingBacking::Shared {
            object: 3,
            offset: 0x1000,
        },
        MappingBacking::Kernel("[vdso]".to_owned()),
    ];
    let mapping = |(at, backing): (u64, MappingBacking)| MemoryMapping {
        start: 0x10_0000 * at,
        end: 0x10_0000 * at + 0x2000,
        protection: 5,
        advice: 0,
        backing,
    };
    (1..).zip(backings).map(mapping).collect()
}

fn shared_memory() -> Vec<SharedMemory> {
    let segment = SystemVSegment {
        id: 7,
        key: 42,
        size: 0x4000,
        mode: 0o600,
        is_marked_removed: false,
        is_locked: false,
        is_gone: false,
        owner: (1000, 1000),
        creator: (1000, 1000),
    };
    let kinds = [
        SharedMemoryKind::Anonymous,
        SharedMemoryKind::Memfd(b"m".to_vec()),
        SharedMemoryKind::File(b"/var/x".to_vec()),
        SharedMemoryKind::SystemV(segment),
        SharedMemoryKind::Posix {
            path: b"/dev/shm/x".to_vec(),
            access: (1000, 1000, 0o600),
        },
        SharedMemoryKind::Deleted {
            form: ContentForm::Deleted {
                path: "/tmp/gone".into(),
            },
            access: (1000, 1000, 0o600),
        },
    ];
    let object = |(inode, kind)| SharedMemory {
        kind,
        size: 0x4000,
        identity: (0, 1, inode),
    };
    (1..).zip(kinds).map(object).collect()
}

fn frozen() -> ProcessTreeState {
    let thread = ThreadState {
        extended_registers: vec![0; 64],
        pending: vec![SignalInfo(vec![0; 128])],
        name: b"worker".to_vec(),
        rseq: Some(Rseq {
            address: 0x1000,
            bytes: 32,
            signature: 1,
        }),
        ..ThreadState::default()
    };
    let process = ProcessState {
        threads: vec![thread],
        signal_actions: vec![SignalAction::default(); 64],
        posix_timers: vec![PosixTimer::default()],
        directory: b"/".to_vec(),
        group_stop: Some(19),
        ..ProcessState::default()
    };
    ProcessTreeState {
        processes: vec![Some(process), None],
    }
}

fn descriptors(files: OpenFilesUpdate) -> DescriptorUpdate {
    DescriptorUpdate {
        files,
        sockets: BTreeMap::new(),
        removed: BTreeSet::from([77]),
    }
}

fn files() -> FilesImage {
    let open = |kind| OpenFile {
        flags: 2,
        owner: Some(SignalOwner {
            kind: 1,
            pid: 100,
            signal: 0,
        }),
        locks: vec![FileLock {
            holder: LockHolder::Table(0),
            write: true,
            start: 0,
            end: Some(9),
        }],
        kind,
    };
    let slot = |number| {
        let slot = DescriptorSlot {
            file: number % 7,
            close_on_exec: number > 6,
        };
        (number, slot)
    };
    FilesImage {
        tables: BTreeMap::from([(
            0,
            DescriptorTable {
                pids: BTreeSet::from([100]),
                slots: (0..9).map(slot).collect(),
                descriptors_max: (1024, 4096),
            },
        )]),
        files: (0..).zip(kinds().map(open)).collect(),
        pipes: BTreeMap::from([(
            100,
            Pipe {
                path: None,
                capacity: 4096,
                chunks: vec![ByteString(b"in it".to_vec())],
                packet_mode: false,
                access: (1000, 1000, 0o600),
            },
        )]),
        contents: BTreeMap::from([(
            101,
            NamelessContent {
                form: ContentForm::Deleted {
                    path: "/tmp/gone".into(),
                },
                access: (1000, 1000, 0o600),
                times_ns: (1, 2),
                size: 10,
                mapped_memory: None,
                chunks: BTreeMap::from([(0, ByteString(b"content".to_vec()))]),
            },
        )]),
        ..FilesImage::default()
    }
}

fn kinds() -> [OpenFileKind; 7] {
    let socket = |link, queue| {
        OpenFileKind::Unix(Box::new(UnixSocket {
            socket: 1,
            name: UnixName::Abstract(ByteString(b"name".to_vec())),
            link,
            owner: (1000, 1000),
            peer: Some((0, 0)),
            shutdown: 0,
            options: Vec::new(),
            filter: holdfast_sys::socket_filter::SocketFilter::default(),
            queue,
        }))
    };
    let message = UnixMessage {
        bytes: ByteString(b"hello".to_vec()),
        files: vec![0],
        credentials: Some((100, 1000, 1000)),
        sender_name: ByteString(Vec::new()),
    };
    let watch = EpollWatch {
        fd: 3,
        file: 0,
        events: 1,
        data: 3,
    };
    [
        OpenFileKind::Event {
            count: 3,
            semaphore: true,
        },
        OpenFileKind::Pipe { pipe: 100 },
        OpenFileKind::Directory {
            path: "/tmp".into(),
            offset: 7,
        },
        socket(UnixConnectionState::Peer(4), vec![message]),
        socket(UnixConnectionState::Peer(3), Vec::new()),
        OpenFileKind::Epoll {
            watches: vec![watch],
        },
        OpenFileKind::Content {
            content: 101,
            offset: 5,
        },
    ]
}

fn runs() -> Vec<PageRun> {
    let run = |space, page: u64, content| PageRun {
        space,
        start: page << 12,
        length: 1 << 12,
        content,
    };
    vec![
        run(MemorySpace::Process(0), 1, PageContent::Bytes),
        run(MemorySpace::Process(0), 7, PageContent::Initial),
        run(MemorySpace::Shared(0), 1, PageContent::Bytes),
    ]
}

fn pages() -> Vec<u8> {
    let bytes = vec![5; 2 << 12];
    let pages = PagesMessage {
        runs: runs(),
        bytes,
    };
    let (front, content) = pages.into_message().expect("small");
    [front, content].concat()
}
