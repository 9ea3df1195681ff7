"""Words that stand for token ids where a server takes text only.

All have four letters, so that the n-th word of a text is found without looking for it, and each is, with the
space before it, one token in common vocabularies of byte-pair encodings: text of n of them is about n tokens.
The list is part of what a seed means: it is never changed.
"""

from __future__ import annotations

__all__ = ["WORDS"]

_LISTED = """
    that with this from have your will more were also part them into some self when time than over know
    like year such been help what need work many used only even form sign just make data call then each
    long read lead fact test life very find back both does grow much main food good made said show same
    care poor less down take play body must plan cell real hand list feel open mean best name move mark
    look type here pain area last turn risk land case head post come text cost view hard line tool role
    step ways book next four past free says give kind mind upon days away ever left path full side term
    near loss hold meet word city wind once seen deep done team file fail live fall idea sent soft mass
    seem port rate came tell door site five drug skin week love true draw took feed fish diet face unit
    wide half soil farm link easy heat lies stop wild slow fire code ones user uses stay safe page wait
    talk camp poll warm bill town cool pack game base host wood gain tree tend feet thus soon foot road
    card held rich sold goal eyes fair load went fast room lost dark news acid date fear told copy deal
    hope task rare dead goes rule miss fuel born core cold rock rise note math king gold weak died gets
    ball hair bond sort blue dial gave baby walk felt male gene race iron dive vast tour film huge milk
    seek hear flex spot sand bone wall song fine item cast dogs seed plot mere roll send jobs meat tail
    sets push eggs rain wing whom knew hour lung tiny vent salt kept bank coal firm flat ship edge thin
"""
WORDS = tuple(_LISTED.split())
