//! TLS verification that accepts any member of the group.

use std::sync::Arc;

use holdfast_api::ca::node_dns_name;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, Error, SignatureScheme};

use super::node_name;

/// Accepts any member of the group under the name in its certificate; the caller must check the name.
#[derive(Debug)]
pub(super) struct AnyMemberVerifier(pub(super) Arc<WebPkiServerVerifier>);

fn server_name(certificate: &CertificateDer<'_>) -> Result<ServerName<'static>, Error> {
    let name = node_name(certificate).map(|name| ServerName::try_from(node_dns_name(&name)));
    let name = name.and_then(Result::ok);
    name.ok_or(Error::InvalidCertificate(CertificateError::NotValidForName))
}

impl ServerCertVerifier for AnyMemberVerifier {
    fn verify_server_cert(
        &self,
        first: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let name = server_name(first)?;
        self.0
            .verify_server_cert(first, rest, &name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0
            .verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0
            .verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
