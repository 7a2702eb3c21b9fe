//! Proof that a host has a join token.
//!
//! The token's secret is the seed of a signing key (Ed25519, RFC 8032). A node keeps the public key alone. The host signs
//! key material that TLS exports for this connection (RFC 8446, section 7.5) together with its certificate request. The
//! signature is worth nothing on another connection and for another request.

use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use rustls::pki_types::CertificateDer;
use sha2::{Digest, Sha256};
use webpki::anchor_from_trusted_cert;

use super::token::{AuthorityId, JoinToken, digest};

/// Label of the key material that TLS exports for the proof.
pub const EXPORTER_LABEL: &[u8] = b"EXPORTER-holdfast-enrolment";

/// Separates seeds of this use from other digests.
const SEED_CONTEXT: &[u8] = b"holdfast join token, version 1";

/// The signing key of a join token.
pub struct TokenKey(Ed25519KeyPair);

impl TokenKey {
    /// Derives the key of `token`.
    pub fn new(token: &JoinToken) -> TokenKey {
        let seed: [u8; 32] = Sha256::new()
            .chain_update(SEED_CONTEXT)
            .chain_update(token.secret)
            .finalize()
            .into();
        TokenKey(Ed25519KeyPair::from_seed_unchecked(&seed).expect("a seed has 32 bytes"))
    }

    /// Returns the public key, which names the token.
    pub fn id(&self) -> [u8; 32] {
        let mut id = [0; 32];
        id.copy_from_slice(self.0.public_key().as_ref());
        id
    }

    /// Signs a certificate request for the connection with the exported key material `exported`.
    pub fn prove(&self, exported: &[u8; 32], request: &[u8]) -> [[u8; 32]; 2] {
        let signature = self.0.sign(&signed_text(exported, request));
        let mut halves = [[0; 32]; 2];
        for (half, bytes) in halves.iter_mut().zip(signature.as_ref().chunks(32)) {
            half.copy_from_slice(bytes);
        }
        halves
    }
}

/// Returns true if `proof` was made with the token `id`, on the connection with the exported key material `exported`, for
/// this request.
pub fn verify_proof(
    id: &[u8; 32],
    proof: &[[u8; 32]; 2],
    exported: &[u8; 32],
    request: &[u8],
) -> bool {
    UnparsedPublicKey::new(&ED25519, id)
        .verify(&signed_text(exported, request), proof.as_flattened())
        .is_ok()
}

fn signed_text(exported: &[u8; 32], request: &[u8]) -> Vec<u8> {
    [*exported, digest(request)].concat()
}

/// Returns the number of the authority with this certificate (DER); none if the bytes are not a certificate.
pub fn authority_id(certificate: &[u8]) -> Option<AuthorityId> {
    let certificate = CertificateDer::from(certificate);
    let anchor = anchor_from_trusted_cert(&certificate).ok()?;
    let digest = digest(anchor.subject_public_key_info.as_ref());
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    Some(AuthorityId(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proof_holds_for_its_token_connection_and_request_only() {
        let token = JoinToken::generate(AuthorityId([1; 16])).unwrap();
        let key = TokenKey::new(&token);
        let again = TokenKey::new(&token.to_string().parse().unwrap());
        assert_eq!(key.id(), again.id());
        let proof = key.prove(&[3; 32], b"request");
        assert!(verify_proof(&key.id(), &proof, &[3; 32], b"request"));
        assert!(!verify_proof(&key.id(), &proof, &[4; 32], b"request"));
        assert!(!verify_proof(&key.id(), &proof, &[3; 32], b"another"));
        let other = TokenKey::new(&JoinToken::generate(AuthorityId([1; 16])).unwrap());
        assert!(!verify_proof(&other.id(), &proof, &[3; 32], b"request"));
        assert!(!verify_proof(&[0; 32], &[[0; 32]; 2], &[3; 32], b"request"));
    }

    #[test]
    fn number_of_an_authority_follows_from_its_certificate() {
        let dir = tempfile::tempdir().unwrap();
        let certificate = |name: &str| {
            let dir = dir.path().join(name);
            crate::ca::CertificateAuthority::init(&dir, "web").unwrap();
            let pem = std::fs::read(dir.join("ca.pem")).unwrap();
            use rustls::pki_types::pem::PemObject;
            CertificateDer::from_pem_slice(&pem).unwrap()
        };
        let (first, second) = (certificate("a"), certificate("b"));
        assert_eq!(authority_id(&first), authority_id(&first));
        assert_ne!(authority_id(&first), authority_id(&second));
        assert_eq!(authority_id(b"text"), None);
    }
}
