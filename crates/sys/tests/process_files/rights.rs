//! Objects that a tree has no right to open are refused by name.

use crate::harness::{Donor, in_child, put, stop};
use holdfast_sys::process::files::image::{Kind, UnixName};
use holdfast_sys::process::files::{Changes, Given, Image, Stock};
use holdfast_sys::process::rights::{Identity, Rights};
use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;

/// An unused user ID.
const USER: u32 = 61_234;

/// Returns the acceptor's refusal of an image, or an empty string if it accepts the image.
fn said(image: &Image, rights: &Rights) -> String {
    in_child(|| {
        let stock = Stock::prepare_for(image.clone(), Given::default(), rights.clone());
        let mut stock = stock.unwrap_or_else(|error| panic!("{error}"));
        let finished = stock.finish(Changes::default(), Given::default());
        finished
            .and_then(|()| stock.publish())
            .unwrap_or_else(|error| panic!("{error}"));
    })
}

fn of_the_user() -> Rights {
    Rights::Of {
        whose: [Identity {
            user: USER,
            group: USER,
            groups: Vec::new(),
        }]
        .into(),
        files: Vec::new(),
    }
}

#[test]
fn a_file_that_only_root_may_open_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    let path = folder.path().join("roots");
    fs::write(&path, "root's").expect("written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("a mode");
    let donor = Donor::new(|| {
        put(File::open(&path).expect("open"), 10);
        stop();
    });
    let image = donor.draft().image;
    assert_eq!(said(&image, &Rights::All), "");
    let refusal = said(&image, &of_the_user());
    assert!(refusal.contains(path.to_str().expect("text")), "{refusal}");
    assert!(refusal.contains("[migration] files"), "{refusal}");
    chown(&path, None, Some(USER)).expect("a group");
    assert_eq!(said(&image, &of_the_user()), "");
}

#[test]
fn a_file_without_a_stamp_is_one_of_the_kernels_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("file");
    fs::write(&path, "anything").expect("written");
    let donor = Donor::new(|| {
        put(File::open(&path).expect("open"), 10);
        put(File::open("/proc/version").expect("open"), 11);
        stop();
    });
    let mut image = donor.draft().image;
    assert_eq!(said(&image, &Rights::All), "");
    for file in image.files.values_mut() {
        if let Kind::Regular { stamp, .. } = &mut file.kind {
            *stamp = None;
        }
    }
    let refusal = said(&image, &Rights::All);
    assert!(refusal.contains(path.to_str().expect("text")), "{refusal}");
}

#[test]
fn a_socket_has_its_name_only_where_its_user_may_make_files() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    let path = folder.path().join("socket");
    let donor = Donor::new(|| {
        put(UnixListener::bind(&path).expect("bound"), 10);
        stop();
    });
    chown(&path, Some(USER), Some(USER)).expect("an owner");
    let mut image = donor.draft().image;
    fs::remove_file(&path).expect("removed");
    let refusal = said(&image, &of_the_user());
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
    let refusal = said(&image, &of_the_user());
    assert!(refusal.contains(path.to_str().expect("text")), "{refusal}");
    assert_eq!(fs::read_to_string(&path).expect("still there"), "root's");
    fs::remove_file(&path).expect("removed");
    assert_eq!(said(&image, &of_the_user()), "");
    let kind = fs::metadata(&path).expect("published").file_type();
    assert!(kind.is_socket());

    // A socket file cannot be given to another user, and its path cannot leave the root of its stage.
    for (user, file) in [
        (0, path.to_str().expect("text")),
        (USER, "/../../tmp/climbed"),
    ] {
        for open in image.files.values_mut() {
            if let Kind::Unix(socket) = &mut open.kind {
                let name = file.to_owned();
                socket.name = UnixName::Path {
                    name: name.clone(),
                    file: Some(name),
                    access: (user, USER, 0o755),
                };
            }
        }
        let refusal = said(&image, &of_the_user());
        assert!(refusal.contains(file), "{refusal}");
    }
}
