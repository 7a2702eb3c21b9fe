use std::io::Write as _;

use holdfast_api::ca::{CertificateAuthority, NODE_DAYS};
use holdfast_daemon::tls::{Tls, TlsError};
use holdfast_wire::NodeId;

use super::group::{
    Group, dial, eventually, hello_bytes, read_to_end, run, run_blocking, tls_files,
};
use holdfast_daemon::config::TlsConfig;

#[test]
fn certificate_of_other_authority_is_refused_on_both_sides() {
    run(async {
        let group = Group::new();
        let other = group.ca().join("other");
        let authority = CertificateAuthority::init(&other, "files").unwrap();
        authority.issue("n2", &[], NODE_DAYS).unwrap();
        // n2 trusts the group's authority, but its own certificate is from another authority.
        let files = TlsConfig {
            ca: group.ca().join("ca.pem"),
            crl: None,
            ..tls_files(&other, "n2")
        };
        let n1 = group.start(1);
        let n2 = group.start_as(group.options(2, 2), Tls::from_files(&files, "n2").unwrap());
        let refused = |node: &super::group::Node| node.metrics.rejections("certificate") > 0;
        eventually("n1 refuses", || refused(&n1)).await;
        eventually("n2 hears why", || refused(&n2)).await;
        eventually("n1 says", || {
            let problem = n1.peers.problem(NodeId(2)).unwrap_or_default();
            problem.contains("certificate refused")
        })
        .await;
        assert!(!n1.peers.is_up(NodeId(2)) && !n2.peers.is_up(NodeId(1)));
    });
}

#[test]
fn certificate_for_another_node_is_refused_by_name() {
    run(async {
        let group = Group::new();
        let n1 = group.start(1);
        // n3's certificate at n2's address.
        let n2 = group.start_as(group.options(2, 2), group.tls("n3"));
        eventually("n1 names both", || {
            let problem = n1.peers.problem(NodeId(2)).unwrap_or_default();
            problem.contains("n2.node") && problem.contains("n3.node")
        })
        .await;
        // Dialling n1, the node claims to be n2 and shows the certificate of n3.
        eventually("n1 refuses", || n1.metrics.rejections("node") > 0).await;
        assert!(!n1.peers.is_up(NodeId(2)) && !n2.peers.is_up(NodeId(1)));
    });
}

#[test]
fn a_revoked_certificate_is_refused() {
    run(async {
        let group = Group::new();
        let revoked = group.tls("n2");
        group.authority().revoke("n2").unwrap();
        let n1 = group.start(1);
        let n2 = group.start_as(group.options(2, 2), revoked);
        eventually("n1 refuses", || {
            n1.metrics.rejections("certificate") > 0
                && n1
                    .peers
                    .problem(NodeId(2))
                    .unwrap_or_default()
                    .contains("Revoked")
        })
        .await;
        eventually("n2 hears", || n2.metrics.rejections("certificate") > 0).await;
        assert!(!n1.peers.is_up(NodeId(2)));
    });
}

#[test]
fn revocation_closes_open_connections() {
    run(async {
        let group = Group::new();
        let (mut n1, mut n2, mut n3) = (group.start(1), group.start(2), group.start(3));
        // The two may come up in any order.
        eventually("n1 is connected with both", || {
            [2, 3].map(NodeId).iter().all(|peer| n1.peers.is_up(*peer))
        })
        .await;
        n2.wait_up(1).await;
        n3.wait_up(1).await;
        group.authority().revoke("n2").unwrap();
        n1.peers.set_tls(group.tls("n1"));
        let reason = n1.wait_lost(2).await;
        assert!(
            reason.to_string().contains("no longer accepted"),
            "{reason}"
        );
        assert!(n1.peers.is_up(NodeId(3)));
        eventually("refused again", || {
            n1.peers
                .problem(NodeId(2))
                .unwrap_or_default()
                .contains("Revoked")
        })
        .await;
        assert!(!n1.peers.is_up(NodeId(2)));
    });
}

#[test]
fn certificate_that_is_revoked_during_the_greeting_is_refused() {
    run(async {
        let group = Group::new();
        let n1 = group.start(1);
        let (tls, address) = (group.tls("n2"), group.address(1));
        let mut dialled = run_blocking(move || {
            let mut dialled = dial(&tls, address, "n1");
            dialled.conn.complete_io(&mut dialled.sock).unwrap();
            dialled
        })
        .await;
        group.authority().revoke("n2").unwrap();
        n1.peers.set_tls(group.tls("n1"));
        run_blocking(move || {
            dialled.write_all(&hello_bytes(2, "files")).unwrap();
            read_to_end(&mut dialled);
        })
        .await;
        eventually("refused", || n1.metrics.rejections("certificate") == 1).await;
        assert!(!n1.peers.is_up(NodeId(2)));
    });
}

#[test]
fn client_without_certificate_is_refused() {
    run(async {
        let group = Group::new();
        let n1 = group.start(1);
        let address = group.address(1);
        let ca = std::fs::read(group.ca().join("ca.pem")).unwrap();
        run_blocking(move || {
            use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
            let mut roots = rustls::RootCertStore::empty();
            roots
                .add(CertificateDer::from_pem_slice(&ca).unwrap())
                .unwrap();
            let provider = rustls::crypto::ring::default_provider().into();
            let config = rustls::ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
            let name = ServerName::try_from("n1.node").unwrap();
            let tls = rustls::ClientConnection::new(config.into(), name).unwrap();
            let socket = std::net::TcpStream::connect(address).unwrap();
            read_to_end(&mut rustls::StreamOwned::new(tls, socket));
        })
        .await;
        eventually("refused", || n1.metrics.rejections("certificate") == 1).await;
    });
}

#[test]
fn tls_before_1_3_is_refused() {
    run(async {
        let group = Group::new();
        let n1 = group.start(1);
        let address = group.address(1);
        run_blocking(move || {
            use std::io::Write;
            // A ClientHello that offers TLS 1.2 only: no supported_versions extension (RFC 8446, 4.2.1).
            let mut hello = vec![0x03, 0x03];
            hello.extend([7; 32]);
            hello.extend([0, 0, 2, 0xc0, 0x2b, 1, 0]);
            // supported_groups, ec_point_formats, signature_algorithms, extended_master_secret.
            let extensions = [
                0, 10, 0, 4, 0, 2, 0, 23, 0, 11, 0, 2, 1, 0, 0, 13, 0, 4, 0, 2, 4, 3, 0, 23, 0, 0,
            ];
            hello.extend((extensions.len() as u16).to_be_bytes());
            hello.extend(extensions);
            let mut record = vec![22, 3, 1];
            record.extend((hello.len() as u16 + 4).to_be_bytes());
            record.extend([1, 0]);
            record.extend((hello.len() as u16).to_be_bytes());
            record.extend(hello);
            let mut socket = std::net::TcpStream::connect(address).unwrap();
            socket.write_all(&record).unwrap();
            read_to_end(&mut socket);
        })
        .await;
        eventually("refused", || n1.metrics.rejections("tls") == 1).await;
    });
}

#[test]
fn mismatched_tls_files_are_named() {
    let group = Group::new();
    let files = tls_files(&group.ca(), "n2");
    let error = Tls::from_files(&files, "n1").err().unwrap();
    assert!(matches!(error, TlsError::OtherName { .. }), "{error}");
    assert!(
        error.to_string().contains("node `n2`, not of node `n1`"),
        "{error}"
    );
    let mixed = TlsConfig {
        key: group.ca().join("n1.key"),
        ..files.clone()
    };
    let error = Tls::from_files(&mixed, "n2").err().unwrap();
    assert!(matches!(error, TlsError::Mismatch(_)), "{error}");
    let missing = TlsConfig {
        crl: Some(group.ca().join("none.crl")),
        ..files.clone()
    };
    let error = Tls::from_files(&missing, "n2").err().unwrap().to_string();
    assert!(error.contains("none.crl"), "{error}");
    let empty = TlsConfig {
        cert: files.key.clone(),
        ..files
    };
    let error = Tls::from_files(&empty, "n2").err().unwrap();
    assert!(matches!(error, TlsError::Empty { .. }), "{error}");
    Tls::from_files(&tls_files(&group.ca(), "n2"), "n2").unwrap();
}
