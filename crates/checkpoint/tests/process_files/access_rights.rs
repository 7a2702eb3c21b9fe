//! Objects that a tree has no right to open are refused by name.

use crate::harness::{Donor, panic_message_of_child, put_at, stop_self};
use holdfast_checkpoint::file_rights::{FileRights, UserIdentity};
use holdfast_checkpoint::files::image::{OpenFileKind, UnixName};
use holdfast_checkpoint::files::{FdStore, FilesImage, FilesImageChanges, ProvidedFiles};
use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;

/// An unused user ID.
const USER: u32 = 61_234;

/// Returns the acceptor's refusal of an image, or an empty string if it accepts the image.
fn refusal_of(image: &FilesImage, rights: &FileRights) -> String {
    panic_message_of_child(|| {
        let store =
            FdStore::prepare_with_rights(image.clone(), ProvidedFiles::default(), rights.clone());
        let mut store = store.unwrap_or_else(|error| panic!("{error}"));
        let finished = store.apply_final(FilesImageChanges::default(), ProvidedFiles::default());
        finished
            .and_then(|()| store.publish())
            .unwrap_or_else(|error| panic!("{error}"));
    })
}

fn rights_of_user() -> FileRights {
    FileRights::Limited {
        identities: [UserIdentity {
            user: USER,
            group: USER,
            groups: Vec::new(),
        }]
        .into(),
        directories: Vec::new(),
    }
}

#[test]
fn file_of_root_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    let path = folder.path().join("roots");
    fs::write(&path, "root's").expect("written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("a mode");
    let donor = Donor::new(|| {
        put_at(File::open(&path).expect("open"), 10);
        stop_self();
    });
    let image = donor.snapshot().image;
    assert_eq!(refusal_of(&image, &FileRights::Root), "");
    let refusal = refusal_of(&image, &rights_of_user());
    assert!(refusal.contains(path.to_str().expect("text")), "{refusal}");
    assert!(refusal.contains("[migration] files"), "{refusal}");
    chown(&path, None, Some(USER)).expect("a group");
    assert_eq!(refusal_of(&image, &rights_of_user()), "");
}

#[test]
fn only_kernel_files_may_lack_a_stamp() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("file");
    fs::write(&path, "anything").expect("written");
    let donor = Donor::new(|| {
        put_at(File::open(&path).expect("open"), 10);
        put_at(File::open("/proc/version").expect("open"), 11);
        stop_self();
    });
    let mut image = donor.snapshot().image;
    assert_eq!(refusal_of(&image, &FileRights::Root), "");
    for file in image.files.values_mut() {
        if let OpenFileKind::Regular {
            fingerprint: stamp, ..
        } = &mut file.kind
        {
            *stamp = None;
        }
    }
    let refusal = refusal_of(&image, &FileRights::Root);
    assert!(refusal.contains(path.to_str().expect("text")), "{refusal}");
}

#[test]
fn socket_name_needs_write_permission_of_its_user() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    let path = folder.path().join("socket");
    let donor = Donor::new(|| {
        put_at(UnixListener::bind(&path).expect("bound"), 10);
        stop_self();
    });
    chown(&path, Some(USER), Some(USER)).expect("an owner");
    let mut image = donor.snapshot().image;
    fs::remove_file(&path).expect("removed");
    let refusal = refusal_of(&image, &rights_of_user());
    assert!(
        refusal.contains(folder.path().to_str().expect("text")),
        "{refusal}"
    );
    assert_eq!(fs::read_dir(folder.path()).expect("readable").count(), 0);

    chown(folder.path(), Some(USER), None).expect("an owner");
    // In a directory like /tmp, a file of another user is not replaced.
    fs::write(&path, "root's").expect("written");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o1777)).expect("a mode");
    chown(folder.path(), Some(0), None).expect("an owner");
    let refusal = refusal_of(&image, &rights_of_user());
    assert!(refusal.contains(path.to_str().expect("text")), "{refusal}");
    assert_eq!(fs::read_to_string(&path).expect("still there"), "root's");
    fs::remove_file(&path).expect("removed");
    assert_eq!(refusal_of(&image, &rights_of_user()), "");
    let kind = fs::metadata(&path).expect("published").file_type();
    assert!(kind.is_socket());

    // A socket file cannot be given to another user, and its path cannot leave the root of its stage.
    for (user, file) in [
        (0, path.to_str().expect("text")),
        (USER, "/../../tmp/climbed"),
    ] {
        for open in image.files.values_mut() {
            if let OpenFileKind::Unix(socket) = &mut open.kind {
                let name = file.to_owned();
                socket.name = UnixName::Path {
                    name: name.clone(),
                    file: Some(name),
                    access: (user, USER, 0o755),
                };
            }
        }
        let refusal = refusal_of(&image, &rights_of_user());
        assert!(refusal.contains(file), "{refusal}");
    }
}
