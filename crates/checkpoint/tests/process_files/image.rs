//! Images come from another node: any bytes give a value or an error, and references lead only to objects of the image.

use holdfast_checkpoint::files::image::{
    ByteString, DescriptorSlot, DescriptorTable, EpollWatch, OpenFile, OpenFileKind, Pipe,
    UnixConnectionState, UnixName, UnixSocket,
};
use holdfast_checkpoint::files::{FilesImage, FilesImageChanges};
use holdfast_sys::socket_filter::SocketFilter;
use proptest::prelude::*;

fn open_file(kind: OpenFileKind) -> OpenFile {
    OpenFile {
        flags: 0,
        owner: None,
        locks: Vec::new(),
        kind,
    }
}

fn unix_socket(link: UnixConnectionState) -> OpenFileKind {
    OpenFileKind::Unix(Box::new(UnixSocket {
        socket: 1,
        name: UnixName::None,
        link,
        owner: (0, 0),
        peer: None,
        shutdown: 0,
        filter: SocketFilter::default(),
        options: Vec::new(),
        queue: Vec::new(),
    }))
}

/// Returns kinds that refer to some of the first files, pipes and tables; some references lead nowhere.
fn kind_strategy() -> impl Strategy<Value = OpenFileKind> {
    prop_oneof![
        any::<(u64, bool)>()
            .prop_map(|(count, semaphore)| OpenFileKind::Event { count, semaphore }),
        any::<u64>().prop_map(|mask| OpenFileKind::Signal { mask }),
        (0u32..6).prop_map(|pipe| OpenFileKind::Pipe { pipe }),
        (0u32..12).prop_map(|peer| unix_socket(UnixConnectionState::Peer(peer))),
        ("/?[a-z]{0,5}", any::<u64>()).prop_map(|(path, offset)| OpenFileKind::Directory {
            path: path.into(),
            offset
        }),
        prop::collection::vec(
            (0u32..2_000_000, 0u32..12, any::<u32>(), any::<u64>()),
            0..4
        )
        .prop_map(|watches| OpenFileKind::Epoll {
            watches: watches
                .into_iter()
                .map(|(fd, file, events, data)| EpollWatch {
                    fd,
                    file,
                    events,
                    data
                })
                .collect()
        }),
    ]
}

fn image_strategy() -> impl Strategy<Value = FilesImage> {
    let slot = (0u32..10, any::<bool>()).prop_map(|(file, close_on_exec)| DescriptorSlot {
        file,
        close_on_exec,
    });
    let table = (
        prop::collection::btree_map(0u32..100, slot, 0..8),
        any::<(u64, u64)>(),
    );
    let table = table.prop_map(|(slots, descriptors_max)| DescriptorTable {
        slots,
        descriptors_max,
        ..DescriptorTable::default()
    });
    let pipe = prop::collection::vec(any::<Vec<u8>>(), 0..3).prop_map(|chunks| Pipe {
        path: None,
        capacity: 4096,
        chunks: chunks.into_iter().map(ByteString).collect(),
        packet_mode: false,
        access: (0, 0, 0o600),
    });
    (
        prop::collection::btree_map(0u32..4, table, 0..3),
        prop::collection::btree_map(0u32..10, kind_strategy().prop_map(open_file), 0..10),
        prop::collection::btree_map(0u32..6, pipe, 0..4),
    )
        .prop_map(|(tables, files, pipes)| FilesImage {
            tables,
            files,
            pipes,
            ..FilesImage::default()
        })
}

proptest! {
    #[test]
    fn arbitrary_bytes_decode_without_panic(bytes: Vec<u8>) {
        let _ = FilesImage::decode(&bytes);
        if let Ok(changes) = FilesImageChanges::decode(&bytes) {
            let _ = FilesImage::default().apply(changes);
        }
    }

    #[test]
    fn image_survives_encoding_or_is_refused_for_dangling_references(image in image_strategy()) {
        let bytes = postcard::to_stdvec(&image).expect("coded");
        let exists = |file: &u32| image.files.contains_key(file);
        let slots = image.tables.values().flat_map(|table| table.slots.values());
        let sound = slots.map(|slot| slot.file).all(|file| exists(&file))
            && image.files.values().all(|file| match &file.kind {
                OpenFileKind::Pipe { pipe } => image.pipes.contains_key(pipe),
                OpenFileKind::Epoll { watches } => {
                    watches.iter().all(|watch| exists(&watch.file) && watch.fd < 1 << 20)
                }
                OpenFileKind::Event { count, .. } => *count != u64::MAX,
                OpenFileKind::Directory { path, offset } => path.as_bytes().starts_with(b"/") && *offset >> 63 == 0,
                OpenFileKind::Unix(socket) => match socket.link {
                    UnixConnectionState::Peer(peer) => {
                        matches!(image.files.get(&peer), Some(OpenFile { kind: OpenFileKind::Unix(_), .. }))
                    }
                    _ => true,
                },
                _ => true,
            });
        match FilesImage::decode(&bytes) {
            Ok(decoded) => {
                prop_assert!(sound);
                prop_assert_eq!(decoded, image);
            }
            Err(error) => prop_assert!(!sound, "{}", error),
        }
        for end in 0..bytes.len() {
            prop_assert!(FilesImage::decode(&bytes[..end]).is_err());
        }
    }

    #[test]
    fn applied_changes_give_the_later_image(before in image_strategy(), after in image_strategy()) {
        let bytes = postcard::to_stdvec(&after.changes_since(&before)).expect("coded");
        let changes = FilesImageChanges::decode(&bytes).expect("decoded");
        let mut there = before.clone();
        if let Ok(former) = there.apply(changes) {
            prop_assert_eq!(&there, &after);
            for (id, file) in &after.files {
                prop_assert_eq!(former.file(*id, file), before.files.get(id));
            }
        }
        let nothing = postcard::to_stdvec(&after.changes_since(&after)).expect("coded");
        prop_assert!(nothing.len() <= 10);
    }
}
