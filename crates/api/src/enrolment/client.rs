//! The host's side of an enrolment.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime,
};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, Error as TlsError,
    PeerMisbehaved, RootCertStore, SignatureScheme, StreamOwned,
};
use x509_parser::prelude::{CertificateRevocationList, FromDer};

use super::{
    ALPN_PROTOCOL, ANSWER_BYTES_MAX, AuthorityId, EXPORTER_LABEL, EnrolmentAnswer,
    EnrolmentRefusal, EnrolmentRequest, JoinToken, MessageError, REQUEST_MESSAGE_BYTES_MAX,
    TimedStream, TokenKey, authority_id, decode, encode, read_message, write_message,
};
use crate::ca::{NodeRole, node_dns_name};

/// Reason why a host got no answer to use.
#[derive(Debug, thiserror::Error)]
pub enum EnrolmentError {
    /// The node cannot be reached.
    #[error("cannot connect to {address}: {error}; check the address, that holdfastd runs there with [joining], and that firewalls let TCP port {} pass", .address.port())]
    Connect {
        /// Address of the node.
        address: SocketAddr,
        /// The system's error.
        error: io::Error,
    },
    /// The node does not belong to the group of the token.
    #[error(
        "the node at {0} has no certificate of the authority that the token names; check address and token"
    )]
    OtherAuthority(SocketAddr),
    /// The times of a certificate do not include the present.
    #[error(
        "the certificate of the node is not valid at this host's time; set the clocks of both hosts (for example with chrony), or renew that certificate"
    )]
    Clock,
    /// TLS failed.
    #[error("TLS with {address}: {error}; check that the port is that of [joining]")]
    Tls {
        /// Address of the node.
        address: SocketAddr,
        /// Error of the TLS handshake.
        error: io::Error,
    },
    /// The exchange broke off.
    #[error(
        "the exchange with {address} broke off: {error}; run the command again, which uses the same key"
    )]
    Broken {
        /// Address of the node.
        address: SocketAddr,
        /// The system's error.
        error: io::Error,
    },
    /// The node is revoked, or has no revocation list that is new enough to tell.
    #[error(
        "the node at {address} is not trusted: {problem}; check the address, and make a new token at the node there"
    )]
    RevocationList {
        /// Address of the node.
        address: SocketAddr,
        /// Reason for not trusting the node.
        problem: String,
    },
    /// The node's answer is malformed, too long, or of another version.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The node refuses to enrol the host.
    #[error(transparent)]
    Refused(EnrolmentRefusal),
    /// A certificate does not fit.
    #[error("the certificate does not fit: {0}; have the request signed again")]
    Certificate(String),
}

/// The result of an enrolment.
#[derive(Debug)]
pub struct Enrolled {
    /// The answer, never a refusal.
    pub answer: EnrolmentAnswer,
    /// Certificate of the group's authority in DER, the one that the token names.
    pub authority: Vec<u8>,
    /// Address from which this host reached the node.
    pub local_address: IpAddr,
}

/// Asks the node at `address` to sign `request` (PKCS #10 in DER), within `limit`. An answer counts only if the node's
/// certificate is not revoked by the list that the token asks for.
///
/// # Errors
/// See [`EnrolmentError`].
pub fn enrol(
    address: SocketAddr,
    token: &JoinToken,
    request: &[u8],
    limit: Duration,
) -> Result<Enrolled, EnrolmentError> {
    let connect_error = |error| EnrolmentError::Connect { address, error };
    let broken = |error| EnrolmentError::Broken { address, error };
    let socket = TcpStream::connect_timeout(&address, limit).map_err(connect_error)?;
    let local_address = socket.local_addr().map_err(connect_error)?.ip();
    let mut stream = TimedStream::new(socket, limit);
    let verifier = Arc::new(TokenVerifier::new(token.authority));
    let mut tls = connection(verifier.clone()).map_err(|error| EnrolmentError::Tls {
        address,
        error: io::Error::other(error),
    })?;
    while tls.is_handshaking() {
        tls.complete_io(&mut stream)
            .map_err(|error| handshake_error(address, error))?;
    }
    let exported = tls
        .export_keying_material([0; 32], EXPORTER_LABEL, None)
        .map_err(|error| broken(io::Error::other(error)))?;
    let key = TokenKey::new(token);
    let message = EnrolmentRequest {
        token: key.id(),
        proof: key.prove(&exported, request),
        request: request.to_vec(),
    };
    let mut stream = StreamOwned::new(tls, stream);
    let message = encode(&message, REQUEST_MESSAGE_BYTES_MAX)?;
    write_message(&mut stream, &message).map_err(broken)?;
    let answer = read_message(&mut stream, ANSWER_BYTES_MAX).map_err(broken)?;
    let authority = verifier.found_authority().unwrap_or_default();
    let answer: EnrolmentAnswer = decode(&answer, ANSWER_BYTES_MAX)?;
    let list = match &answer {
        EnrolmentAnswer::Refused { reason } => {
            return Err(EnrolmentError::Refused(reason.clone()));
        }
        EnrolmentAnswer::Signed { group, .. } | EnrolmentAnswer::SignOffline { group } => {
            group.revocations.as_deref()
        }
    };
    let chain = stream.conn.peer_certificates().unwrap_or_default();
    check_not_revoked(token, &authority, chain, list)
        .map_err(|problem| EnrolmentError::RevocationList { address, problem })?;
    Ok(Enrolled {
        answer,
        authority,
        local_address,
    })
}

/// Checks that the node with the certificates `chain` is not revoked by its `list` (DER), which the authority (DER) must
/// have signed and which must not be older than the token says.
fn check_not_revoked(
    token: &JoinToken,
    authority: &[u8],
    chain: &[CertificateDer<'_>],
    list: Option<&[u8]>,
) -> Result<(), String> {
    let wanted = token.list_number();
    let Some(list) = list else {
        return match wanted {
            0 => Ok(()),
            _ => Err(format!(
                "it has no revocation list, and must have list {wanted}"
            )),
        };
    };
    let number = list_number(list).ok_or("its revocation list has no number")?;
    if number < wanted {
        return Err(format!(
            "its revocation list {number} is older than list {wanted}"
        ));
    }
    let refused = |error: TlsError| match error {
        TlsError::InvalidCertificate(CertificateError::Revoked) => {
            "its certificate is revoked".to_owned()
        }
        error => format!("its revocation list does not fit: {error}"),
    };
    let first = chain.first().ok_or("it has no certificate")?;
    let name = node_server_name(first).map_err(refused)?;
    let list = CertificateRevocationListDer::from(list.to_vec());
    verify_chain(
        first,
        &CertificateDer::from(authority),
        &name,
        UnixTime::now(),
        vec![list],
    )
    .map_err(refused)
}

/// Returns the number of a revocation list in DER (RFC 5280, section 5.2.3).
fn list_number(list: &[u8]) -> Option<u64> {
    let (_, list) = CertificateRevocationList::from_der(list).ok()?;
    match list.crl_number()?.to_u64_digits()[..] {
        [] => Some(0),
        [number] => Some(number),
        _ => None,
    }
}

/// Checks that a certificate (DER) is of this authority (DER), for node `name`, and for the private key `key` (PEM).
///
/// # Errors
/// [`EnrolmentError::Certificate`], or [`EnrolmentError::Clock`].
pub fn certificate_matches(
    certificate: &[u8],
    authority: &[u8],
    name: &str,
    key: &str,
) -> Result<(), EnrolmentError> {
    let refused = |error: TlsError| match is_clock_error(&error) {
        true => EnrolmentError::Clock,
        false => EnrolmentError::Certificate(error.to_string()),
    };
    let certificate = CertificateDer::from(certificate.to_vec());
    let name = ServerName::try_from(node_dns_name(name))
        .map_err(|error| EnrolmentError::Certificate(error.to_string()))?;
    verify_chain(
        &certificate,
        &CertificateDer::from(authority),
        &name,
        UnixTime::now(),
        Vec::new(),
    )
    .map_err(refused)?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes())
        .map_err(|error| EnrolmentError::Certificate(error.to_string()))?;
    let key = ring::sign::any_supported_type(&key).map_err(refused)?;
    CertifiedKey::new(vec![certificate], key)
        .keys_match()
        .map_err(refused)
}

/// Returns the role that a certificate (DER) admits its node to; none if the certificate names none,
/// as those of earlier releases do.
pub fn certified_role(certificate: &[u8]) -> Option<NodeRole> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
    let units = parsed.subject().iter_organizational_unit();
    NodeRole::from_units(units.filter_map(|unit| unit.as_str().ok()))
}

/// Returns the first certificate (DER) in a PEM file.
pub fn first_certificate(pem: &[u8]) -> Option<Vec<u8>> {
    let certificate = CertificateDer::from_pem_slice(pem).ok()?;
    Some(certificate.to_vec())
}

fn connection(verifier: Arc<TokenVerifier>) -> Result<ClientConnection, TlsError> {
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN_PROTOCOL.to_vec()];
    config.enable_sni = false;
    let any_node = ServerName::try_from("any.node").expect("a DNS name");
    ClientConnection::new(Arc::new(config), any_node)
}

fn handshake_error(address: SocketAddr, error: io::Error) -> EnrolmentError {
    let cause = error
        .get_ref()
        .and_then(|cause| cause.downcast_ref::<TlsError>());
    match cause {
        Some(TlsError::InvalidCertificate(CertificateError::UnknownIssuer)) => {
            EnrolmentError::OtherAuthority(address)
        }
        Some(cause) if is_clock_error(cause) => EnrolmentError::Clock,
        _ => EnrolmentError::Tls { address, error },
    }
}

fn is_clock_error(error: &TlsError) -> bool {
    use CertificateError as E;
    matches!(
        error,
        TlsError::InvalidCertificate(
            E::Expired | E::ExpiredContext { .. } | E::NotValidYet | E::NotValidYetContext { .. }
        )
    )
}

/// Returns the name of the node in a certificate.
fn node_server_name(certificate: &CertificateDer<'_>) -> Result<ServerName<'static>, TlsError> {
    let unknown = || TlsError::InvalidCertificate(CertificateError::UnknownIssuer);
    let parsed = webpki::EndEntityCert::try_from(certificate).map_err(|_| unknown())?;
    let name = (parsed.valid_dns_names())
        .find(|name| name.ends_with(&node_dns_name("")))
        .ok_or(TlsError::InvalidCertificate(
            CertificateError::NotValidForName,
        ))?;
    ServerName::try_from(name.to_owned()).map_err(|_| unknown())
}

/// Verifies that `first` is a certificate of `authority` for a node. If there are revocation lists, one must cover the
/// certificate, and none may revoke it.
fn verify_chain(
    first: &CertificateDer<'_>,
    authority: &CertificateDer<'_>,
    name: &ServerName<'_>,
    now: UnixTime,
    lists: Vec<CertificateRevocationListDer<'static>>,
) -> Result<(), TlsError> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone().into_owned())?;
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
        .with_crls(lists)
        .build()
        .map_err(|error| TlsError::General(error.to_string()))?;
    verifier
        .verify_server_cert(first, &[], name, &[], now)
        .map(|_| ())
}

/// Accepts any node with a certificate of the token's authority, which the node must send along.
#[derive(Debug)]
struct TokenVerifier {
    authority: AuthorityId,
    found: Mutex<Option<Vec<u8>>>,
    provider: CryptoProvider,
}

impl TokenVerifier {
    fn new(authority: AuthorityId) -> TokenVerifier {
        TokenVerifier {
            authority,
            found: Mutex::new(None),
            provider: ring::default_provider(),
        }
    }

    /// Returns the certificate of the authority that the node has sent.
    fn found_authority(&self) -> Option<Vec<u8>> {
        self.found.lock().ok()?.clone()
    }
}

impl ServerCertVerifier for TokenVerifier {
    fn verify_server_cert(
        &self,
        first: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        let unknown = || TlsError::InvalidCertificate(CertificateError::UnknownIssuer);
        let authority = rest
            .iter()
            .find(|certificate| authority_id(certificate) == Some(self.authority))
            .ok_or_else(unknown)?;
        verify_chain(first, authority, &node_server_name(first)?, now, Vec::new())?;
        if let Ok(mut found) = self.found.lock() {
            *found = Some(authority.to_vec());
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        // The configuration offers TLS 1.3 alone.
        Err(PeerMisbehaved::SelectedTls12UsingTls13VersionExtension.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ca::{CertificateAuthority, CertificateRequest, CertificateTerms, NodeKey};

    #[test]
    fn error_of_the_system_is_in_the_text_alone() {
        let address = SocketAddr::from(([10, 0, 0, 1], 7401));
        let error = || io::Error::from(io::ErrorKind::ConnectionRefused);
        for failure in [
            EnrolmentError::Connect {
                address,
                error: error(),
            },
            EnrolmentError::Tls {
                address,
                error: error(),
            },
            EnrolmentError::Broken {
                address,
                error: error(),
            },
        ] {
            assert!(failure.to_string().contains("connection refused"));
            // A command that prints the sources too would print the text twice.
            assert!(std::error::Error::source(&failure).is_none());
        }
    }

    #[test]
    fn node_must_have_the_list_of_the_token_and_not_be_revoked_by_it() {
        let dir = tempfile::tempdir().unwrap();
        let authority = CertificateAuthority::init(dir.path(), "web").unwrap();
        let from_pem = |file: &str| {
            let pem = std::fs::read(dir.path().join(file)).unwrap();
            CertificateDer::from_pem_slice(&pem).unwrap()
        };
        let list = || {
            let pem = authority.revocations_pem().unwrap();
            CertificateRevocationListDer::from_pem_slice(pem.as_bytes()).unwrap()
        };
        authority.issue("n1", &[], 9).unwrap();
        authority.issue("n2", &[], 9).unwrap();
        let (n1, n2) = (from_pem("n1.pem"), from_pem("n2.pem"));
        let (first_list, ca) = (list(), from_pem("ca.pem"));
        authority.revoke("n2").unwrap();
        let second_list = list();
        let other = CertificateAuthority::init(&dir.path().join("other"), "web").unwrap();
        other.issue("n2", &[], 9).unwrap();
        other.revoke("n2").unwrap();
        let pem = other.revocations_pem().unwrap();
        let foreign_list = CertificateRevocationListDer::from_pem_slice(pem.as_bytes()).unwrap();
        let token = |number| {
            JoinToken::with_secret(authority_id(&ca).unwrap(), [1; 16]).require_list(number)
        };
        let check = |number, node: &CertificateDer<'static>, list: Option<&[u8]>| {
            check_not_revoked(&token(number), &ca, std::slice::from_ref(node), list)
        };
        check(0, &n1, None).unwrap();
        check(0, &n1, Some(&first_list)).unwrap();
        check(2, &n1, Some(&second_list)).unwrap();
        for (number, node, list, problem) in [
            (2, &n2, None, "must have list 2"),
            (2, &n2, Some(&first_list[..]), "older than list 2"),
            (2, &n2, Some(&second_list[..]), "is revoked"),
            (2, &n2, Some(&foreign_list[..]), "does not fit"),
            (0, &n2, Some(&second_list[..]), "is revoked"),
            (1, &n1, Some(&b"no list"[..]), "has no number"),
        ] {
            let refused = check(number, node, list).unwrap_err();
            assert!(refused.contains(problem), "{refused}");
        }
    }

    #[test]
    fn certificate_must_fit_authority_name_and_key() {
        let dir = tempfile::tempdir().unwrap();
        let authority = |name: &str| {
            let authority = CertificateAuthority::init(&dir.path().join(name), "web").unwrap();
            let pem = authority.certificate_pem().unwrap();
            let der = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
            (authority, der.to_vec())
        };
        let ((own, own_der), (_, other_der)) = (authority("a"), authority("b"));
        let key = NodeKey::generate().unwrap();
        let request = key.request("n2").unwrap();
        let request = CertificateRequest::from_der(&request.der).unwrap();
        let certificate = own.sign(&request, 90).unwrap().der;
        let pem = key.to_pem();
        certificate_matches(&certificate, &own_der, "n2", &pem).unwrap();
        let other_key = NodeKey::generate().unwrap().to_pem();
        for (authority, name, key) in [
            (&other_der, "n2", &pem),
            (&own_der, "n3", &pem),
            (&own_der, "n2", &other_key),
        ] {
            let refused = certificate_matches(&certificate, authority, name, key);
            assert!(
                matches!(refused, Err(EnrolmentError::Certificate(_))),
                "{name}: {refused:?}"
            );
        }
    }

    #[test]
    fn certificate_names_the_role_of_its_terms() {
        let dir = tempfile::tempdir().unwrap();
        let authority = CertificateAuthority::init(dir.path(), "web").unwrap();
        let request = NodeKey::generate().unwrap().request("n2").unwrap();
        let request = CertificateRequest::from_der(&request.der).unwrap();
        for role in [Some(NodeRole::Backup), Some(NodeRole::Server), None] {
            let terms = CertificateTerms { days: 9, role };
            let certificate = authority.sign(&request, terms).unwrap();
            assert_eq!(certified_role(&certificate.der), role);
        }
        let of_days_alone = authority.sign(&request, 9).unwrap();
        assert_eq!(certified_role(&of_days_alone.der), Some(NodeRole::Backup));
        assert_eq!(certified_role(b"no certificate"), None);
        let both = [NodeRole::Backup, NodeRole::Server].map(NodeRole::unit);
        assert_eq!(NodeRole::from_units(both.into_iter()), None);
    }
}
