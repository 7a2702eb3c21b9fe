//! Tests of the certificate authority's files: created once, never overwritten, private. (The node's channel tests
//! verify the certificates with real TLS.)

use std::fs;
use std::os::unix::fs::PermissionsExt;

use holdfast_api::ca::{
    CaError, CertificateAuthority, CertificateRequest, NODE_DAYS, NodeKey, random_serial,
};

fn new_authority() -> (tempfile::TempDir, CertificateAuthority) {
    let dir = tempfile::tempdir().unwrap();
    let authority = CertificateAuthority::init(&dir.path().join("ca"), "files").unwrap();
    (dir, authority)
}

#[test]
fn authority_files_are_private() {
    let (dir, authority) = new_authority();
    authority.issue("n1", &[], NODE_DAYS).unwrap();
    let mut names = Vec::new();
    for entry in fs::read_dir(dir.path().join("ca")).unwrap() {
        let entry = entry.unwrap();
        let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{:?}", entry.path());
        names.push(entry.file_name().into_string().unwrap());
    }
    names.sort();
    let expected = [
        "ca.crl",
        "ca.key",
        "ca.pem",
        "n1.key",
        "n1.pem",
        "serials.log",
    ];
    assert_eq!(names, expected);
}

#[test]
fn authority_files_are_never_overwritten() {
    let (dir, authority) = new_authority();
    let before = fs::read(dir.path().join("ca/ca.pem")).unwrap();
    let again = CertificateAuthority::init(&dir.path().join("ca"), "files");
    assert!(matches!(again.err(), Some(CaError::Exists(_))));
    assert_eq!(fs::read(dir.path().join("ca/ca.pem")).unwrap(), before);

    let issued = authority.issue("n1", &[], NODE_DAYS).unwrap();
    let before = (
        fs::read(&issued.cert).unwrap(),
        fs::read(&issued.key).unwrap(),
    );
    let again = authority.issue("n1", &[], NODE_DAYS);
    assert!(matches!(again, Err(CaError::Exists(_))), "{again:?}");
    let after = (
        fs::read(&issued.cert).unwrap(),
        fs::read(&issued.key).unwrap(),
    );
    assert_eq!(after, before);
}

#[test]
fn a_reopened_authority_issues_and_revokes() {
    let (dir, authority) = new_authority();
    drop(authority);
    let path = dir.path().join("ca");
    let authority = CertificateAuthority::open(&path).unwrap();
    let addresses = ["10.0.0.11".parse().unwrap(), "fd00::11".parse().unwrap()];
    let first = authority.issue("n1", &addresses, NODE_DAYS).unwrap();
    let other = authority.issue("n2", &[], NODE_DAYS).unwrap();
    assert_ne!(first.serial, other.serial);

    let empty = fs::read(path.join("ca.crl")).unwrap();
    assert_eq!(
        authority.revoke("n1").unwrap(),
        std::slice::from_ref(&first.serial)
    );
    assert_ne!(fs::read(path.join("ca.crl")).unwrap(), empty);
    assert!(!first.cert.exists() && !first.key.exists());
    assert!(other.cert.exists());
    let again = authority.revoke("n1");
    assert!(matches!(again, Err(CaError::NotIssued(_))), "{again:?}");

    let second = authority.issue("n1", &addresses, NODE_DAYS).unwrap();
    assert_ne!(first.serial, second.serial);
    assert_eq!(
        authority.revoke("n1").unwrap(),
        std::slice::from_ref(&second.serial)
    );
    let log = fs::read_to_string(path.join("serials.log")).unwrap();
    let starts: Vec<String> = log
        .lines()
        .map(|line| line.split(' ').take(3).collect::<Vec<_>>().join(" "))
        .collect();
    let expected = [
        format!("issued {} n1", first.serial),
        format!("issued {} n2", other.serial),
        format!("revoked {} n1", first.serial),
        format!("issued {} n1", second.serial),
        format!("revoked {} n1", second.serial),
    ];
    assert_eq!(starts, expected);
}

#[test]
fn bad_names_and_a_damaged_log_are_refused() {
    let (dir, authority) = new_authority();
    for name in ["", "ca", "N1", "../n1", "-n", "a.b", &"n".repeat(41)] {
        let issued = authority.issue(name, &[], NODE_DAYS);
        assert!(
            matches!(issued, Err(CaError::Name(_))),
            "{name}: {issued:?}"
        );
    }
    let log = dir.path().join("ca/serials.log");
    fs::write(&log, "issued 0g n1 5\n").unwrap();
    let revoked = authority.revoke("n1");
    assert!(
        matches!(revoked, Err(CaError::Log { line: 1, .. })),
        "{revoked:?}"
    );
}

#[test]
fn a_missing_authority_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = CertificateAuthority::open(dir.path())
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("ca.key"), "{error}");
}

#[test]
fn signed_name_is_taken_until_it_is_revoked() {
    let (dir, authority) = new_authority();
    let request = |name: &str| {
        let der = NodeKey::generate().unwrap().request(name).unwrap().der;
        CertificateRequest::from_der(&der).unwrap()
    };
    authority.check_free("n1").unwrap();
    let first = authority.sign(&request("n1"), 90).unwrap();
    let renewed = authority.sign(&request("n1"), 90).unwrap();
    assert_ne!(first.serial, renewed.serial);
    let taken = authority.check_free("n1");
    assert!(matches!(taken, Err(CaError::InForce(_))), "{taken:?}");
    authority.check_free("n2").unwrap();
    assert_eq!(
        authority.revoke("n1").unwrap(),
        [first.serial, renewed.serial]
    );
    authority.check_free("n1").unwrap();
    // No key and no certificate of a node that made its key itself lies here.
    let files = fs::read_dir(dir.path().join("ca")).unwrap().count();
    assert_eq!(files, 4);
}

#[test]
fn log_that_a_crash_has_cut_stops_the_authority() {
    let (dir, authority) = new_authority();
    let request = NodeKey::generate().unwrap().request("n2").unwrap();
    let request = CertificateRequest::from_der(&request.der).unwrap();
    let log = dir.path().join("ca/serials.log");
    // Each line but the last is whole, and the last would be readable with a line end.
    let cut = "issued 4001 n1 5\nissued 4002 n2 5";
    fs::write(&log, cut).unwrap();
    for result in [
        authority.check_free("n3"),
        authority.certificates_of("n3").map(drop),
        authority.issue("n3", &[], 9).map(drop),
        authority.sign(&request, 9).map(drop),
        authority.renew(&request, 9, 0x4002).map(drop),
        authority.revoke("n1").map(drop),
    ] {
        assert!(
            matches!(result, Err(CaError::Log { line: 2, .. })),
            "{result:?}"
        );
    }
    assert_eq!(fs::read_to_string(&log).unwrap(), cut);
    assert!(!dir.path().join("ca/n3.key").exists());
}

#[test]
fn revoked_certificate_is_not_renewed() {
    let (_dir, authority) = new_authority();
    let request = NodeKey::generate().unwrap().request("n1").unwrap();
    let request = CertificateRequest::from_der(&request.der).unwrap();
    let present = random_serial().unwrap();
    authority.sign_with_serial(&request, 9, present).unwrap();
    authority.renew(&request, 9, present).unwrap();
    authority.revoke("n1").unwrap();
    let refused = authority.renew(&request, 9, present);
    assert!(matches!(refused, Err(CaError::Revoked(_))), "{refused:?}");
    let known = authority.certificates_of("n1").unwrap();
    assert_eq!((known.len(), known[0].serial), (2, present));
    assert!(known.iter().all(|certificate| certificate.is_revoked));
}

#[test]
fn no_renewal_escapes_a_revocation() {
    let (dir, authority) = new_authority();
    let path = dir.path().join("ca");
    for round in 0..20 {
        let name = format!("n{round}");
        let request = NodeKey::generate().unwrap().request(&name).unwrap();
        let request = CertificateRequest::from_der(&request.der).unwrap();
        let present = random_serial().unwrap();
        authority.sign_with_serial(&request, 9, present).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let daemon = CertificateAuthority::open(&path).unwrap();
                while daemon.renew(&request, 9, present).is_ok() {}
            });
            authority.revoke(&name).unwrap();
        });
        authority.check_free(&name).unwrap();
    }
}

#[test]
fn ended_certificate_takes_no_name_and_is_not_listed() {
    let (dir, authority) = new_authority();
    let log = dir.path().join("ca/serials.log");
    fs::write(&log, "issued 4001 n1 5 1000\nissued 4002 n1 5\n").unwrap();
    // Earlier releases logged no end.
    assert_eq!(authority.revoke("n1").unwrap(), ["4002"]);
    authority.check_free("n1").unwrap();
    fs::write(&log, "revoked 4001 n1 5 1000\n").unwrap();
    let damaged = authority.check_free("n1");
    assert!(
        matches!(damaged, Err(CaError::Log { line: 1, .. })),
        "{damaged:?}"
    );
}
